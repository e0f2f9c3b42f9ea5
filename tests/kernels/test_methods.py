"""Which method a pass takes: the table's of its shape and precision, and what it takes where the table is silent."""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from own_tables import table_of

from fp8tune_kernels import catalog
from fp8tune_kernels.gemm import methods, passes
from fp8tune_kernels.gemm.methods import ANY, ANY_ONCE, FP8_ONLY, method_for
from fp8tune_kernels.gemm.passes import BF16, BF16_TORCH, FP8, FP8_TORCH
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.tables import Row

CPU = torch.device("cpu")
LAYER = {"M": 16640, "N": 768, "K": 2048, "G": 128}


def row(method: int, precision: int | None, name: str = "forward", **sizes: int) -> Row:
    layer = {**LAYER, **sizes}
    layer["M_bucket"] = 1 << layer.pop("M").bit_length() - 1
    key = None if precision is None else tuple(sorted({**layer, "precision": precision}.items()))
    return f"grouped-mm-{name}", "", key, (("METHOD", method),)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's tables; a CPU reads that of the interpreter."""
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
    lookup.forget()
    yield tmp_path
    lookup.forget()


def write(folder: Path, *rows: Row, nearest: tuple[str, ...] = ()) -> None:
    (folder / "interpreter.py").write_text(table_of(*rows, nearest=nearest))
    lookup.forget()


def asked(precision: int, name: str = "forward", **sizes: int) -> int:
    return method_for(name, *{**LAYER, **sizes}.values(), precision, CPU)


@pytest.mark.parametrize("name", methods.PASSES)
def test_without_a_table_it_is_our_fp8_gemm_or_if_bf16_may_be_faster_torchs(folder: Path, name: str) -> None:
    assert asked(FP8_ONLY, name) == FP8
    assert asked(ANY, name) == BF16_TORCH
    assert asked(ANY_ONCE, name) == BF16_TORCH


def test_each_precision_has_the_method_that_was_measured_with_it(folder: Path) -> None:
    write(folder, row(FP8_TORCH, FP8_ONLY), row(BF16, ANY), row(FP8, ANY_ONCE))
    assert [asked(precision) for precision in (FP8_ONLY, ANY, ANY_ONCE)] == [FP8_TORCH, BF16, FP8]
    assert asked(ANY, "input-gradient") == BF16_TORCH
    assert asked(ANY, M=16384) == BF16  # the same bucket


@pytest.mark.parametrize("nearest", [(), ("grouped-mm-forward",)])
def test_bf16_is_left_only_for_what_was_measured_with_the_precision(folder: Path, nearest: tuple[str, ...]) -> None:
    write(folder, row(FP8, FP8_ONLY), row(FP8_TORCH, None), nearest=nearest)
    assert asked(FP8_ONLY) == FP8
    assert asked(FP8_ONLY, M=65536) == (FP8 if nearest else FP8_TORCH)
    assert asked(ANY) == asked(ANY_ONCE, M=65536) == BF16_TORCH
    write(folder, row(FP8, ANY), row(BF16, ANY, M=1 << 20), row(BF16_TORCH, ANY_ONCE), row(FP8_TORCH, None))
    assert asked(ANY, M=65536) == FP8  # the nearest, and more rows a group
    assert asked(ANY, N=1536) == FP8  # as many
    assert asked(ANY, M=8192) == FP8  # half as many
    assert asked(ANY, M=8191) == BF16_TORCH  # fewer: the casts of the weights weigh more
    assert asked(ANY, M=1 << 20) == BF16
    assert asked(ANY, M=1 << 21) == BF16_TORCH  # the nearest is our bf16 GEMM, which was not measured there
    assert asked(ANY_ONCE, M=65536) == BF16_TORCH
    assert asked(FP8_ONLY) == FP8_TORCH
    write(folder, row(BF16_TORCH, None), nearest=nearest)
    assert asked(FP8_ONLY) == FP8  # never bf16, whatever serves most shapes


def test_the_weight_gradient_does_not_know_when_the_weights_were_quantized(folder: Path) -> None:
    write(folder, row(FP8, ANY, "weight-gradient"))
    assert asked(ANY_ONCE, "weight-gradient") == FP8


def test_it_costs_the_host_little(folder: Path) -> None:
    write(folder, row(FP8, ANY))
    for precision in (FP8_ONLY, ANY):
        asked(precision)
        best_s = min(timeit.repeat(lambda precision=precision: asked(precision), number=2000, repeat=5)) / 2000
        assert best_s < 20e-6, f"{1e6 * best_s:.2f} us"  # a busy machine; 1 us where nothing else runs


def test_methods_have_the_names_that_tables_print() -> None:
    assert passes.METHODS == catalog.METHODS
    assert len(catalog.PRECISIONS) == len({FP8_ONLY, ANY, ANY_ONCE})
    assert [f"grouped-mm-{name}" for name in methods.PASSES] == [*catalog.PASSES]


def test_meta_tensors_have_the_table_of_the_arch_that_is_compiled_for(folder: Path) -> None:
    meta, spec = torch.device("meta"), catalog.load("grouped-mm-forward")
    key = (16384, 768, 2048, 128, ANY)
    (folder / "sm_90.py").write_text(table_of(row(BF16, ANY)))
    lookup.forget()
    assert lookup.running_arch(meta) == "interpreter"
    assert lookup.nearest_row(spec, key, meta) is None
    with lookup.compiling_for("sm_90"):
        assert lookup.running_arch(meta) == "sm_90"
        assert lookup.running_arch(CPU) == "interpreter"
        assert lookup.config_for(spec, key, meta) == {"METHOD": BF16}
        assert lookup.nearest_row(spec, key, meta) == (key, {"METHOD": BF16})
    assert lookup.config_for(spec, key, meta) == {"METHOD": FP8}
