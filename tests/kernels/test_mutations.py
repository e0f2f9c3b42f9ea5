"""A fault planted in a copy of a kernel must not pass the check that comes before the clock."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import leads
from mutants import FAULTS
from planting import planted

from fp8tune.measure import guards
from fp8tune.measure.trial import Tensors
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

SHAPES = {
    "colwise": NamedInts(M=501, K=70, G=3),
    "colwise-3d": NamedInts(E=2, N=3, K=9001),
    "colwise-dual": NamedInts(M=501, N=40, K=24, G=3),
    "colwise-transpose-3d": NamedInts(E=2, N=165, K=134),
    "mxfp8-dim0": NamedInts(M=6, K=1100),
    "mxfp8-dim1": NamedInts(M=285, K=133),
    "mxfp8-dim1-3d": NamedInts(E=2, N=285, K=133),
    "mxfp8-dim1-3d-via-2d": NamedInts(E=2, N=157, K=133),
    "rowwise": NamedInts(N=70, M=1301, G=4),
    "rowwise-2d": NamedInts(M=5, K=9001),
    "rowwise-colwise": NamedInts(M=309, K=134, G=3),
    "rowwise-factored": NamedInts(M=61, K=9001, G=3),
    "transpose-3d-atomic": NamedInts(E=2, N=677, K=70),
    "transpose-3d-reduction": NamedInts(E=2, N=677, K=70),
    "transposed-codes": NamedInts(M=309, K=134, G=3),
    "transposed-codes-3d": NamedInts(E=2, N=176, K=134),
}
"""No block divides a dim, and every kernel's default takes more than one tile or block."""

CHECKED = (*catalog.QUANTIZERS, *catalog.TRANSPOSERS)

PADDING = 23
"""Rows past the last group: a whole chunk of 16 among them."""


def check(spec: KernelSpec, kernel: str, device: str) -> str | None:
    """What a sweep's check says of the kernel's default config, in each layout, and in panels too where it has them."""
    for layout, lead in itertools.product(spec.input_layouts, leads(spec)):
        wrong = check_one(spec, kernel, layout, NamedInts({**spec.default, **lead}), device)
        if wrong is not None:
            return wrong
    return None


def check_one(spec: KernelSpec, kernel: str, layout: str, config: NamedInts, device: str) -> str | None:
    problem, inputs, expected = right(kernel, layout, device)
    own = guarded(inputs, device)
    return Tensors(spec, problem, own, guarded(spec.outputs(*own), device), expected).check(config)


@functools.lru_cache(maxsize=4)
def right(kernel: str, layout: str, device: str) -> tuple[Problem, tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """A problem, its inputs and what the reference makes of them: of ragged groups the first of which is empty, with
    padding rows."""
    spec = catalog.load(kernel)
    routing = "ragged" if spec.routed else "none"
    mode = ("", *spec.scale_modes)[-1]
    problem = Problem(kernel, SHAPES[kernel], routing, layout, in_dtype=spec.in_dtypes[0], scale_mode=mode)
    inputs = spec.inputs(problem, "cpu")  # the same values on every device: some faults are right on others
    for offs in inputs:
        if isinstance(offs, torch.Tensor) and offs.dtype == torch.int32:
            offs.clamp_(max=problem.shape["M"] - PADDING)[0] = 0
    return problem, inputs, spec.reference(*guarded(inputs, device))


def guarded(values: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """The same on a device, every tensor copied between guard bytes: a fault may go past a tensor's end, not wild."""
    return tuple(_guarded(value, device) if isinstance(value, torch.Tensor) else value for value in values)


def _guarded(tensor: torch.Tensor, device: str) -> torch.Tensor:
    copy = guards.guarded(tensor, device)
    copy.untyped_storage().fill_(0)  # read as offsets, anything else would have a faulty kernel run for minutes
    return copy.copy_(tensor)


@pytest.mark.parametrize("kernel", CHECKED)
def test_a_copy_without_a_fault_passes(kernel: str, tmp_path: Path, device: str) -> None:
    assert check(planted(kernel, tmp_path), kernel, device) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, tmp_path: Path, device: str) -> None:
    kernel = fault.partition(":")[0].split(", ")[0]
    wrong = check(planted(fault, tmp_path, *FAULTS[fault]), kernel, device)
    assert wrong is not None
    assert "elements differ, first at" in wrong or "bytes written" in wrong


def test_every_kernel_has_faults_of_its_own() -> None:
    assert {fault.partition(":")[0].split(", ")[0] for fault in FAULTS} == set(CHECKED)
