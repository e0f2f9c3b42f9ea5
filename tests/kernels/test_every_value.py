"""Kernels on every bfloat16 value there is, and on float32 values beside each power of two: the reference's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from on_edges import assert_same_bits
from test_references import EVERY_BFLOAT16, boundaries

from fp8tune_kernels import catalog, interpreter
from fp8tune_kernels.quantize.arithmetic import FP8_MAX
from fp8tune_kernels.quantize.gated import (
    ACTIVATIONS,
    gated,
    gated_gradient,
    reference_gated,
    reference_gated_gradient,
)
from fp8tune_kernels.quantize.row_shifts import reference_shifts, shifts_and_scales
from fp8tune_kernels.spec import NamedInts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities, in the interpreter

WHOLE_ROWS = {
    "rowwise-2d": NamedInts(BLOCK_SIZE=4096, BLOCK_SIZE_ITER=1, num_warps=8, num_stages=1),
    "mxfp8-dim0": NamedInts(BLOCK_SIZE_M=2048, BLOCK_SIZE_K=32, num_warps=8, num_stages=1),
}


def check(kernel: str, values: torch.Tensor, dtype: torch.dtype, mode: Any) -> None:
    """Each value as a row of its own, and so with a scale of its own."""
    spec = catalog.load(kernel)
    inputs = values[:, None], dtype, mode
    outputs = spec.outputs(*inputs)
    spec.launch(WHOLE_ROWS[kernel], inputs, outputs)
    assert_same_bits(outputs, spec.reference(*inputs))


@pytest.mark.parametrize("values", [EVERY_BFLOAT16, boundaries()], ids=["every bfloat16", "float32 boundaries"])
@pytest.mark.parametrize(
    ("kernel", "mode"), [("rowwise-2d", True), ("rowwise-2d", False), ("mxfp8-dim0", "floor"), ("mxfp8-dim0", "rceil")]
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_codes_and_scales(values: torch.Tensor, kernel: str, mode: Any, dtype: torch.dtype, device: str) -> None:
    check(kernel, values.to(device), dtype, mode)


@pytest.mark.parametrize("dtype", FP8_MAX)
def test_scales_next_to_where_the_quotient_is_a_power_of_two(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.float8_e4m3fnuz and device != "cpu":
        pytest.skip("an AMD format")
    exact = (FP8_MAX[dtype] * 2.0 ** torch.arange(-140, 110)).to(torch.float32).view(torch.int32)
    amax = torch.cat([(exact + step).view(torch.float32).abs() for step in range(-3, 4)])
    check("rowwise-2d", amax.to(device), dtype, True)


@triton.jit
def of_every_value(gate_ptr: Any, up_ptr: Any, h_ptr: Any, slope_ptr: Any, ACTIVATION: tl.constexpr) -> None:
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    gate, up = tl.load(gate_ptr + at).to(tl.float32), tl.load(up_ptr + at).to(tl.float32)
    tl.store(h_ptr + at, gated(gate, up, ACTIVATION))
    d_gate, _, _ = gated_gradient(gate, up, tl.full((4096,), 1.0, tl.float32), ACTIVATION)
    tl.store(slope_ptr + at, d_gate)


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)), ids=ACTIVATIONS)
def test_every_gate_of_bfloat16_gives_the_same_bits(activation: int, device: str) -> None:
    """Compare bits for any ``exp`` of a backend: see the constants of :mod:`fp8tune_kernels.quantize.gated`."""
    gate = EVERY_BFLOAT16.to(device)
    up = torch.full_like(gate, 0.0 if ACTIVATIONS[activation] == "gpt-oss" else 1.0)
    h, slope = (torch.empty(2**16, device=device) for _ in range(2))
    of_every_value[(16,)](gate, up, h, slope, activation)
    of_ones = reference_gated_gradient(gate, up, torch.ones_like(gate), activation)[0]
    assert_same_bits((h, slope), (reference_gated(gate, up, activation), of_ones))


# The kernel of shifts, which belongs to no spec


@pytest.mark.parametrize("sizes", [[0, 5, 0], [3], [4096, 1, 5000]])
def test_the_kernel_of_shifts_gives_the_references_bits(
    sizes: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", True)  # else both are the reference
    offs = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    M = int(offs[-1]) + 10_003
    generator = torch.Generator().manual_seed(0)
    scales, others = (torch.exp2(torch.randint(-20, 49, (M,), generator=generator)).to(device) for _ in range(2))
    scales[:2], others[1:2] = 0, float("nan")
    shifts, least = reference_shifts(scales, others, offs)
    column_scales = torch.exp2(torch.randint(-9, 9, (len(sizes), 1, 2064), generator=generator)).to(device)
    expected = shifts, (least[:, None] / column_scales.view(len(sizes), -1)).view(-1), least.new_ones(len(sizes) * 48)
    assert_same_bits(shifts_and_scales(scales, others, offs, column_scales, 2064, 48), expected)
    tokens = torch.randperm(M, generator=generator).to(device, torch.int32)
    by_token = torch.empty_like(others).scatter_(0, tokens.long(), others)
    expected = shifts, least.repeat_interleave(96), expected[2]
    assert_same_bits(shifts_and_scales(scales, by_token, offs, None, 96, 48, tokens), expected)
