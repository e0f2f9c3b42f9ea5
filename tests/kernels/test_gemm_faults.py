"""A fault planted in a copy of a grouped GEMM is found by the check before the clock, in the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gemm_mutants import BF16, FAULTS, FP8, GemmFault
from planting import planted

from fp8tune.measure import checking, edges
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on infinities, in the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_grouped_gemms.py compiles them side by side"),
]

GEMMS = ("grouped-rows", "grouped-contraction")

BLOCKS = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "BAND": 2}
"""Of the config that is checked: a round problem has several of each."""

ROUND = {
    "grouped-rows": NamedInts(M=384, N=128, K=128, G=2),
    "grouped-contraction": NamedInts(M=256, N=192, K=128, G=2),
}
"""Problems as a sweep times them, but small: nothing is left over of any block, and a band is full or half full."""


@functools.cache
def checked_on(kernel: str, dtype: str) -> tuple[checking.Tensors, ...]:
    """The tensors of the round problem and of its edges, the smallest first: a fault shares them, as they are whole
    after a check."""
    spec = catalog.load(kernel)
    problem = Problem(kernel, ROUND[kernel], "balanced", in_dtype=dtype)
    on_edges = [checking.build_edge(spec, edge, "cpu") for edge in edges.edges_of(spec, problem)]
    return checking.build(spec, problem, "cpu"), *sorted(on_edges, key=lambda each: each.in_a_row_bytes)


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """A worker process runs other tests afterwards."""
    yield
    checked_on.cache_clear()


def wrong_on(spec: KernelSpec, kernel: str, dtype: str, descriptors: int) -> Iterator[tuple[int, str]]:
    """What each of :func:`checked_on` finds, with its number, in one launch."""
    config = NamedInts({**spec.default, **BLOCKS, "DESCRIPTORS": descriptors})
    for number, tensors in enumerate(checked_on(kernel, dtype)):
        if wrong := replace(tensors, spec=spec).check(config, [number]):
            yield number, wrong


def place(number: int, fault: GemmFault) -> tuple[int, str]:
    """A value of DESCRIPTORS and a dtype for each fault, in turn: a GPU has time for more."""
    places = [(descriptors, dtype) for descriptors in fault.descriptors for dtype in fault.dtypes]
    return places[number % len(places)]


@pytest.mark.parametrize(
    ("title", "descriptors", "dtype"), [(title, *place(n, fault)) for n, (title, fault) in enumerate(FAULTS.items())]
)
def test_a_planted_fault_is_found(title: str, descriptors: int, dtype: str, tmp_path: Path) -> None:
    fault = FAULTS[title]
    spec = planted(title, tmp_path, *fault.changes)
    number, wrong = next(wrong_on(spec, title.partition(":")[0].partition(",")[0], dtype, descriptors), (-1, ""))
    assert "elements differ, first at" in wrong or "bytes written" in wrong
    assert number > 0 or not fault.hides, wrong


@pytest.mark.parametrize(
    ("descriptors", "dtype"),  # each value of both; AMD's GPUs have no descriptors
    [(0, "float8_e4m3fnuz"), (1, BF16), (2, FP8)],
)
@pytest.mark.parametrize("kernel", GEMMS)
def test_a_copy_without_a_fault_is_right(kernel: str, descriptors: int, dtype: str, tmp_path: Path) -> None:
    assert [*wrong_on(planted(kernel, tmp_path), kernel, dtype, descriptors)] == []
