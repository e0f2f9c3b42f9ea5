"""The Hugging Face kernel that ``kernels/hub/assemble.py`` writes loads alone, and beside its own package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

ALONE = """
import importlib.util, sys
import torch

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fp8tune_kernels", "fp8tune"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
outputs = []
for number, folder in enumerate(sys.argv[1:]):
    name = f"build{number}"
    spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for public in module.__all__:
        getattr(module, public)
    outputs.append(module.quantize_rowwise_2d(torch.ones(4, 32, dtype=torch.bfloat16)))
assert all(torch.equal(a.float(), b.float()) for a, b in zip(*outputs))
assert not hasattr(torch.ops.fp8tune, "quantize_rowwise_2d")
assert "torch._dynamo" not in sys.modules  # it takes a second to import
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, str(ROOT / "kernels" / "hub" / "assemble.py"), str(folder)], check=True)
    return folder


def test_two_builds_load_into_one_process_without_the_package(hub: Path) -> None:
    variants = [str(hub / "build" / name) for name in ("torch-cpu", "torch-cuda")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", ALONE, *variants], env=environment, cwd=hub, check=True)


def test_kernels_loads_the_build_and_its_tests_pass(hub: Path) -> None:
    loading = pytest.importorskip(
        "kernels.load", exc_type=ImportError
    )  # `kernels` alone may be this repository's folder
    assert loading.get_local_kernel(hub).moe_layer.__name__ == "moe_layer"
    pytest.importorskip("kernels._rust").Build.open(hub)  # raises for what a build.toml may not have
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", str(hub / "tests")]
    local = {**os.environ, "LOCAL_KERNELS": f"fp8tune/fp8tune-kernels={hub}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=local, cwd=hub, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
