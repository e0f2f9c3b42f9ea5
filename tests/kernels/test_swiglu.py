"""The kernels of a gated activation: the same bytes on every backend, config and edge, and faults that show."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from planting import planted

from fp8tune.measure.checking import Tensors, build, build_edge
from fp8tune.measure.edges import edges_of
from fp8tune_kernels import catalog, quantize_rowwise_2d, quantize_swiglu_gradient, quantize_swiglu_rowwise
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.quantize import gated_rows, swiglu_gradient, swiglu_rowwise, whole_rows
from fp8tune_kernels.quantize.gated import (
    ACTIVATIONS,
    gated,
    gated_gradient,
    reference_gated,
    reference_gated_gradient,
)
from fp8tune_kernels.runtime.lookup import compiling_for
from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities, in the interpreter

FP8 = "float8_e4m3fn"
EVERY_BFLOAT16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
each_kernel = pytest.mark.parametrize("kernel", catalog.GATED)


@triton.jit
def of_every_value(gate_ptr: Any, up_ptr: Any, h_ptr: Any, slope_ptr: Any, ACTIVATION: tl.constexpr) -> None:
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    gate, up = tl.load(gate_ptr + at).to(tl.float32), tl.load(up_ptr + at).to(tl.float32)
    tl.store(h_ptr + at, gated(gate, up, ACTIVATION))
    d_gate, _, _ = gated_gradient(gate, up, tl.full((4096,), 1.0, tl.float32), ACTIVATION)
    tl.store(slope_ptr + at, d_gate)


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)), ids=ACTIVATIONS)
def test_every_gate_of_bfloat16_gives_the_same_bits(activation: int, device: str) -> None:
    """Whatever ``exp`` a backend has: see the constants of :mod:`fp8tune_kernels.quantize.gated`."""
    gate = EVERY_BFLOAT16.to(device)
    up = torch.full_like(gate, 0.0 if ACTIVATIONS[activation] == "gpt-oss" else 1.0)
    h, slope = (torch.empty(2**16, device=device) for _ in range(2))
    of_every_value[(16,)](gate, up, h, slope, activation)
    assert_same(h, reference_gated(gate, up, activation))
    assert_same(slope, reference_gated_gradient(gate, up, torch.ones_like(gate), activation)[0])


def assert_same(found: torch.Tensor, right: torch.Tensor) -> None:
    same = (found.view(torch.int32) == right.view(torch.int32)) | (found.isnan() & right.isnan())
    assert bool(same.all()), found[~same][:4]


def test_the_formulas_are_torchs_and_transformers_to_bfloat16() -> None:
    gate, up = torch.randn(2, 4096, dtype=torch.float64).bfloat16()
    right = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(reference_gated(gate, up, 0).double(), right, rtol=2**-8, atol=1e-30)
    gate, up = 4 * gate, 4 * up
    clamped = gate.double().clamp(max=7)
    right = (up.double().clamp(-7, 7) + 1) * clamped * torch.sigmoid(1.702 * clamped)
    torch.testing.assert_close(reference_gated(gate, up, 1).double(), right, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)), ids=ACTIVATIONS)
def test_gradients_are_those_of_autograd_to_bfloat16(activation: int) -> None:
    given = [(5 * torch.randn(4096)).bfloat16() for _ in range(2)]
    gate, up = (each.double().requires_grad_() for each in given)
    if ACTIVATIONS[activation] == "gpt-oss":
        clamped = gate.clamp(max=7)
        h = (up.clamp(-7, 7) + 1) * clamped * torch.sigmoid(1.702 * clamped)
    else:
        h = torch.nn.functional.silu(gate) * up
    right = torch.autograd.grad(h.sum(), (gate, up))
    found = reference_gated_gradient(*given, torch.ones_like(given[0]), activation)
    for mine, exact in zip(found, right, strict=False):
        torch.testing.assert_close(mine.double(), exact, rtol=2**-7, atol=1e-4)


CONFIGS = ({}, {"BLOCK_SIZE_M": 32, "TILE": 8192}, {"BLOCK_SIZE_M": 8, "TILE": 2048, "num_warps": 4, "num_stages": 3})


@each_kernel
@pytest.mark.parametrize("in_dtype", ["bfloat16", FP8])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_gives_the_reference_bytes(
    kernel: str, in_dtype: str, config: dict[str, int], device: str
) -> None:
    for number, routing in enumerate(("ragged", "empty")):
        tensors = built(kernel, routing, in_dtype, device)
        assert tensors.check(NamedInts({**tensors.spec.default, **config}), [number]) is None


@functools.cache
def built(kernel: str, routing: str, in_dtype: str, device: str) -> Tensors:
    spec = catalog.load(kernel)
    return build(spec, Problem(kernel, NamedInts(spec.interpreted), routing, in_dtype=in_dtype), device)


@functools.cache
def on_edges(kernel: str, device: str) -> list[Tensors]:
    """Of each edge, the smallest first."""
    spec = catalog.load(kernel)
    problem = Problem(kernel, NamedInts(spec.interpreted), "ragged")
    found = [build_edge(spec, edge, device) for edge in edges_of(spec, problem)]
    return sorted(found, key=lambda tensors: tensors.in_a_row_bytes)


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    built.cache_clear()
    on_edges.cache_clear()


@each_kernel
def test_the_default_is_right_on_every_edge(kernel: str, device: str) -> None:
    assert outcome(catalog.load(kernel), kernel, device) is None


def outcome(spec: KernelSpec, kernel: str, device: str) -> str | None:
    """The first thing that is wrong on an edge with a kernel's spec, or that of a copy."""
    found = (replace(tensors, spec=spec).check(spec.default, range(1)) for tensors in on_edges(kernel, device))
    return next(filter(None, found), None)


@each_kernel
def test_the_reference_is_the_same_in_blocks_of_rows(kernel: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a large problem at once took 75 GB: no config of it could be checked on an H100."""
    all_at_once = on_edges(kernel, device)
    monkeypatch.setattr(gated_rows, "VALUES_AT_ONCE", 1000)
    for tensors in all_at_once:
        M, N = (tensors.problem.shape[dim] for dim in "MN")
        assert len([*gated_rows.blocks_of_rows(M, N)]) == -(-M // max(1, 1000 // N))
        for whole, in_blocks in zip(tensors.expected, tensors.spec.reference(*tensors.inputs), strict=True):
            assert torch.equal(whole.view(torch.uint8), in_blocks.view(torch.uint8)), tensors.problem


# of a module beside the kernel's own, the title says which
FAULTS = {
    "swiglu-rowwise": {
        "rows of no group read": ("(row + lanes < last)", "(row + lanes < M)"),
        "the maxima of the first tile alone": ("tl.maximum(largest, largest_of_rows(h_rest))", "largest"),
        "gate_and_up: interleaved taken for halves": ("if INTERLEAVED:\n        W", "if INTERLEAVED == 2:\n        W"),
        "gate_and_up: a bias without rounding": ("gate.to(tl.bfloat16).to(tl.float32), 0.0)", "gate, 0.0)"),
        "weights left out": ("* weights if weights_ptr is not None", "if weights_ptr is not None"),
        "the last rows left out": ("-(-rows // config", "(rows // config"),
        "scales unwritten": ("tl.store(scales_ptr + row + lanes, scale, mask=in_rows)", "in_rows = in_rows & True"),
    },
    "swiglu-gradient": {
        "factors of another group": ("group.to(tl.int64) * (2 * N)\n    gate =", "0\n    gate ="),
        "the maxima of the gate alone": ("largest_of_both(y_gate, y_up)", "largest_of_both(y_gate, y_gate)"),
        "rows past the groups read": ("& (block.group < G)  # rows", "& (block.group <= G)  # rows"),
        "columns past the last": ("is_read[:, None] & (columns < N)", "is_read[:, None] & (columns <= N)"),
        "codes of the gate twice": ("q_ptr, y_gate, y_up, scale", "q_ptr, y_gate, y_gate, scale"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "fault"), [(kernel, fault) for kernel in FAULTS for fault in FAULTS[kernel]])
def test_a_planted_fault_is_caught(kernel: str, fault: str, tmp_path: Path, device: str) -> None:
    where, colon, _ = fault.partition(":")
    modules = f"{kernel}, {where}" if colon else kernel
    assert outcome(planted(modules, tmp_path, *FAULTS[kernel][fault]), kernel, device) is not None


@each_kernel
def test_least_bytes_are_those_of_inputs_and_outputs(kernel: str) -> None:
    spec = catalog.load(kernel)
    shape = {"M": 1024, "N": 512, "G": 4}
    wide = {"swiglu-rowwise": 5, "swiglu-gradient": 8}[kernel]
    assert spec.bytes_of(Problem(kernel, NamedInts(shape), "jagged")) == wide * 1024 * 512
    narrow = Problem(kernel, NamedInts(shape), "jagged", in_dtype=FP8)
    assert spec.bytes_of(narrow) == (wide - 2) * 1024 * 512


def given(**options: Any) -> tuple[Any, ...]:
    problem = Problem("swiglu-rowwise", NamedInts(M=75, N=32, G=3, **options), "empty")
    return swiglu_rowwise.inputs(problem, "cpu")


def test_kept_codes_are_those_of_rowwise_2d() -> None:
    x, offs, *_ = given()
    *_, q_x, scales_x = quantize_swiglu_rowwise(x, offs, keep=True)
    right = quantize_rowwise_2d(x)
    last = int(offs[-1])
    assert torch.equal(q_x[:last].view(torch.uint8), right[0][:last].view(torch.uint8))
    assert torch.equal(scales_x[:last], right[1][:last])


COMPILED_BYTES = [
    *((768, 8192, 3, 2, 49184), (768, 8192, 4, 2, 73760), (8192, 2048, 4, 2, 98368), (28672, 2048, 3, 2, 262272)),
    *((768, 8192, 3, 3, 73760), (8192, 2048, 4, 3, 147520), (14336, 2048, 3, 3, 196672), (28672, 2048, 3, 3, 393344)),
]
"""N, TILE, stages, matrices, and the shared memory that Triton 3.7.1 gives a block of both kernels for sm_90."""


@pytest.mark.parametrize(("N", "TILE", "stages", "matrices", "compiled"), COMPILED_BYTES)
def test_shared_memory_of_stages_is_that_of_the_compiler(
    N: int, TILE: int, stages: int, matrices: int, compiled: int
) -> None:
    config = {"BLOCK_SIZE_M": 16, "TILE": TILE, "num_warps": 8, "num_stages": stages}
    assert 0 <= whole_rows.shared_bytes(config, N, matrices) - compiled <= whole_rows.EXCHANGED_BYTES


@each_kernel
def test_stages_that_a_block_has_no_shared_memory_for_are_neither_timed_nor_launched(kernel: str) -> None:
    """A row of short rows may be the nearest of longer ones."""
    spec = catalog.load(kernel)
    config = NamedInts(BLOCK_SIZE_M=16, TILE=2048, num_warps=32, num_stages=3)
    short, long = ({"M": 512, "N": N, "G": 4} for N in (8192, 32768))
    assert spec.invalid(config, short, ARCHES["sm_90"]) is None
    reason = spec.invalid(config, long, ARCHES["sm_90"])
    assert reason is not None
    assert re.search(r"bytes of rows in 3 stages, sm_90 has 232448 of shared memory a block$", reason)
    assert "shared" not in (spec.invalid(config, long, ARCHES["gfx942"]) or "")

    matrices = {"swiglu-rowwise": swiglu_rowwise, "swiglu-gradient": swiglu_gradient}[kernel].MATRICES
    for arch, stages in (("sm_90", 1), ("gfx942", 3)):
        with compiling_for(arch):
            launched = [whole_rows.options(config, N, matrices, torch.device("meta")) for N in (8192, 32768)]
        assert launched == [{"BLOCK_SIZE_M": 16, "num_warps": 32, "num_stages": number} for number in (3, stages)]


@each_kernel
def test_it_is_an_operator_as_torch_wants_them(kernel: str) -> None:
    spec = catalog.load(kernel)
    wrapper = {"swiglu-rowwise": quantize_swiglu_rowwise, "swiglu-gradient": quantize_swiglu_gradient}[kernel]
    operator = getattr(torch.ops.fp8tune, wrapper.__name__).default
    inputs = spec.inputs(Problem(kernel, NamedInts(M=21, N=16, G=2), "ragged"), "cpu")
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, inputs, test_utils=tests)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"activation": "gelu"}, "activation is 'gelu', wanted 'swiglu' or 'gpt-oss'"),
        ({"layout": "thirds"}, "layout is 'thirds', wanted 'halves' or 'interleaved'"),
        ({"x": torch.zeros(4, 3).bfloat16()}, r"x has shape \(4, 3\) .* wanted row-major"),
        ({"x": torch.zeros(75, 64)}, "x is torch.float32, wanted torch.bfloat16 or FP8 codes"),
        ({"x_scales": torch.ones(75)}, "x_scales is a tensor, wanted None beside torch.bfloat16"),
        ({"bias": torch.zeros(3, 64)}, "bias is torch.float32 of shape .* wanted 192 contiguous"),
        ({"weights": torch.ones(74)}, "weights is .* wanted 75 contiguous values of torch.float32"),
    ],
)
def test_what_no_kernel_reads_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    x, offs, *_ = given()
    with pytest.raises(ValueError, match=says) as found:
        quantize_swiglu_rowwise(**{"x": x, "offs": offs, **change})
    assert "\n" not in str(found.value)
