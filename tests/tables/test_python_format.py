from __future__ import annotations

import ast
import runpy
import subprocess
import sys
import tempfile
from dataclasses import replace

import format_picks as made
import pytest
from any_text import any_text
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.records import Status
from fp8tune.replay.recording import Config, Kernel
from fp8tune.tables.formats import Options
from fp8tune.tables.formats.python_file import write
from fp8tune.tables.picks import KernelPicks

SMALL = {"kwargs": dict(made.SMALL.kwargs), "num_warps": 4, "num_stages": 3}
LARGE = {"kwargs": dict(made.LARGE.kwargs), "num_warps": 8, "num_stages": 2}
BF16, H200 = "torch.bfloat16", made.H200.name


def text(*kernels: KernelPicks) -> str:
    (file,) = write(kernels, Options())
    return file.text


def run(*kernels: KernelPicks) -> dict[str, object]:
    """The names of the file, run by itself."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8", newline="") as file:
        file.write(text(*kernels))
        file.flush()
        return runpy.run_path(file.name)


def test_a_key_has_its_config_and_evidence() -> None:
    (file,) = write([made.gemm()], Options())
    assert str(file.path) == "_matmul_sm_90.py"
    module = run(made.gemm())
    assert (module["KEY"], module["KERNEL"]) == (("M", "N", "K", "the dtype of each tensor"), "maker.gemm:_matmul")
    assert module["TABLE"][H200][1024, 4096, 4096, BF16] == LARGE
    assert module["EVIDENCE"][H200][16, 4096, 4096, BF16].endswith("measured on M=16 N=4096 K=4096, exact")
    config_for = module["config_for"]
    config_for((16, 4096, 4096, BF16), H200).pop("kwargs")  # a caller changes nothing in the table
    assert config_for((16, 4096, 4096, BF16), H200) == SMALL


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((100, 4096, 4096, BF16), SMALL),  # 16 * 1024 = 128 * 128: below it 16 is nearer
        ((200, 4096, 4096, BF16), LARGE),
        ((16, 4096, 4096, "torch.float16"), None),
        ((16, 4096, BF16), None),
        ((0, 4096, 4096, BF16), None),
    ],
)
def test_another_key_has_the_config_of_the_nearest_with_the_same_dtypes(key, expected) -> None:
    assert run(made.gemm())["config_for"](key, H200) == expected


def test_no_device_gets_the_config_of_another() -> None:
    slower = made.gemm(device=replace(made.H200, name="NVIDIA H100"))
    config_for = run(made.gemm(), replace(slower, picks=slower.picks[1:]))["config_for"]
    devices = {H200: SMALL, "NVIDIA H100": LARGE, "NVIDIA B200": None}
    assert {device: config_for((16, 4096, 4096, BF16), device) for device in devices} == devices
    with pytest.raises(UsageError, match="name one with --device"):
        text(made.gemm(), made.gemm(replace(made.GEMM, key=("M",))))


def test_problems_of_one_key_share_the_config_whose_largest_slowdown_is_least() -> None:
    kernel = replace(made.GEMM, key=("N", "K"))
    picks = [made.pick({"M": M, "N": 4096, "K": 4096}, made.TIMES_US[M, 4096, 4096], kernel) for M in (16, 1024)]
    config_for = run(made.kernel_picks(*picks, kernel=kernel))["config_for"]
    assert config_for((4096, 4096, BF16), H200)["kwargs"] == made.EVEN.kwargs


def test_a_config_that_was_wrong_on_another_launch_of_its_key_counts_as_unchecked() -> None:
    kernel, sizes = replace(made.GEMM, key=("N", "K")), {"N": 4096, "K": 4096}
    times_us = ((1.0, Status.WRONG, Status.WRONG), (Status.WRONG, 1.0, Status.WRONG))
    picks = [made.pick({"M": M, **sizes}, times, kernel) for M, times in zip((16, 32), times_us, strict=True)]
    assert run(made.kernel_picks(picks[0], kernel=kernel))["UNCHECKED"] == {}
    assert [*run(made.kernel_picks(*picks, kernel=kernel))["UNCHECKED"][H200]] == [(4096, 4096, BF16)]


def test_a_kernel_with_a_specification_is_looked_up_by_its_lookup_key() -> None:
    module = run(made.gemm(is_recorded=False))
    assert module["KEY"] == ("M", "N", "K")
    config = module["config_for"]((16, 4096, 4096), H200)
    assert {**config.pop("kwargs"), **config} == {**made.SMALL.kwargs, "num_warps": 4, "num_stages": 3}


def test_it_is_imported_without_anything_installed(tmp_path) -> None:
    (tmp_path / "table.py").write_text(text(made.gemm()))
    code = f"import table; print(table.config_for((16, 4096, 4096, '{BF16}'), '{H200}')['num_warps'])"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "4\n"


def kernel_of(config: Config, device: str = H200, key: tuple = (1,), evidence: str = "measured", name: str = "m:k"):
    """One problem of a kernel with one config."""
    kernel = Kernel(name, key=("n",), configs=(config,))
    pick = made.pick({"n": 1}, (1.0,), kernel, key=key, evidence=evidence)
    return made.kernel_picks(pick, kernel=kernel, device=replace(made.H200, name=device))


def test_dtypes_are_imported_and_a_pre_hook_is_left_to_pin() -> None:
    config = Config({"ACC": {"dtype": "tl.float32"}, "E": 1}, has_pre_hook=True)
    source = text(kernel_of(config, key=({"dtype": "torch.float8_e4m3fn"},)))
    assert "import torch\nimport triton.language as tl\n" in source
    assert '(torch.float8_e4m3fn,): {"kwargs": {"ACC": tl.float32, "E": 1}, "num_warps": 4' in source


@pytest.mark.parametrize("value", [{"dtype": "torch.load"}, {"dtype": "tl.float32()"}, {"function": "os:system"}])
def test_code_is_refused(value) -> None:
    with pytest.raises(UsageError, match=r"cannot be written as source: use fp8tune\.pin"):
        text(kernel_of(Config({"A": value})))


texts = any_text() | st.sampled_from(['"', "\\", "'''", '"""', "\n", "\r", "\x0c", "\u2028", "{0}", "\\N{DASH}", "#"])
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts


@given(st.dictionaries(texts, values, max_size=3), texts, st.lists(values, min_size=1, max_size=3), texts, texts)
def test_no_value_becomes_code(kwargs, device, key, evidence, name) -> None:
    kernel = kernel_of(Config(kwargs), device, tuple(key), evidence, name)
    kinds = [type(node).__name__ for node in ast.parse(text(kernel).encode()).body]
    assert ({*kinds}, kinds.count("Expr")) == ({"Expr", "Import", "Assign", "FunctionDef"}, 1)
    module = run(kernel)
    assert module["KERNEL"] == name
    assert list(module["EVIDENCE"][device]) == [tuple(key)]
    assert module["TABLE"][device][tuple(key)]["kwargs"] == kwargs
