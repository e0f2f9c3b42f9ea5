"""Wait for Triton in each process under ``fp8tune record``, and patch it. Python runs this file first.

Then runs the file of this name that Python would have run otherwise. Imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))

PATCHED = {
    "triton.runtime.autotuner": "patch_autotuner",
    "triton.runtime.interpreter": "patch_bare",
    "torch._higher_order_ops.triton_kernel_wrap": "patch_torch_compile",
}
"""Module -> the function of fp8tune.replay.watch.patches that is called when it has been imported."""


def _patch(module: ModuleType) -> None:
    try:
        _load("fp8tune", os.path.join(_PACKAGE, "__init__.py"))
        for part in ("tuners", "identity", "agreement", "pinning"):
            _load_part(part)
        from fp8tune.replay.watch import patches

        getattr(patches, PATCHED[module.__name__])(module)
    except Exception as error:  # the program goes on, unrecorded
        print(f"fp8tune: process {os.getpid()} is not recorded: {error!r}", file=sys.stderr)


def _load_part(name: str) -> Any:
    """Load a module of fp8tune_kernels without the package, which the program may have."""
    path = os.path.join(os.environ["FP8TUNE_RECORD_KERNELS"], name)
    return _load(f"fp8tune_kernels.{name}", os.path.join(path, "__init__.py") if os.path.isdir(path) else f"{path}.py")


def _pin(module: ModuleType) -> None:
    """Pin what ``FP8TUNE_PIN`` names, in a program whose environment would not."""
    _load_part("pinning").pin_from_environment()


def _load(name: str, path: str) -> ModuleType:
    """Make a part of this fp8tune importable, but nothing else that lies beside it.

    The program's environment may have none, or another version, whose recordings the command could not read.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_the_users_own() -> None:
    paths = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("FP8TUNE_RECORD"):
    _actions = {**dict.fromkeys(PATCHED, _patch), **({"triton": _pin} if os.environ.get("FP8TUNE_PIN") else {})}
    sys.meta_path.insert(0, _load_part("imports").AfterImport(_actions))
_run_the_users_own()
