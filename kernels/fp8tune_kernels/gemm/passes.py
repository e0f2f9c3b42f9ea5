"""Casts and grouped products of one pass, on operands that were checked, without a dispatcher.

    multiply, multiply_bf16    rows of each expert times its weights: (M, X) x (E, X, Y) -> (M, Y)
    contract, contract_bf16    a.t() @ b over the rows of each expert: (M, N), (M, K) -> (E, N, K)

``offs``, (E,), int32, holds the end row of each expert's group, non-decreasing, at most M. Results are bfloat16. Rows
past ``offs[-1]`` are zeros, and so is the product of an expert without rows. FP8 products run our GEMMs, products of
bfloat16 those of torch. The device of the operands is the current one. On a CPU everything runs in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import interpreter
from ..quantize import colwise_3d, rowwise_2d, transpose_3d_atomic, transposed_codes_3d
from ..runtime.launching import launch_kernel
from ..runtime.lookup import running_arch
from ..runtime.ops import is_traced
from . import grouped_contraction, grouped_contraction_hopper, grouped_rows, grouped_rows_hopper
from .grouped_contraction import ALIGNMENT
from .warp_specialized import is_requested

Quantized = tuple[Tensor, ...]
"""FP8 values and scales."""

_ZEROS_EMPTY_GROUPS = ("sm_90",)
"""Arches where ``torch._grouped_mm`` writes zeros for a group without rows (pytorch/pytorch#172439: not sm_100)."""

ZEROS = {"BLOCK_SIZE": 4096, "num_warps": 4}
PROGRAMS = 132
"""Programs of a kernel that most often has nothing to do: an H200's multiprocessors."""

interpreter.install()


# Casts


def quantize_rows(x: Tensor, float8_dtype: torch.dtype) -> Quantized:
    """Return FP8 values of a matrix with a scale per row."""
    return rowwise_2d.SPEC(x, float8_dtype, True)


def quantize_stored(w: Tensor, float8_dtype: torch.dtype) -> Quantized:
    """Return FP8 values (E, columns, rows), a view, and a scale per row of weights (E, rows, columns).

    Weights lie row-major, or are ``.mT`` of row-major weights; the values lie as :func:`multiply` takes them.
    """
    if w.is_contiguous():
        return colwise_3d.SPEC(w.mT, float8_dtype, True)
    # us on an H100, atomic / reduction: 67 / 88 at one expert of 8192 x 5120, 801 / 1,131 at 16, 254 / 247 at 64 small
    return transpose_3d_atomic.SPEC(w, float8_dtype, True)


def transpose_stored(q: Tensor) -> Tensor:
    """Return the FP8 values of :func:`quantize_stored`, transposed in memory; their scales stay those of rows."""
    return transposed_codes_3d.SPEC(q)[0]


# Products


def multiply(rows: Quantized, weights: Quantized, offs: Tensor) -> Tensor:
    """Return the product of rows with a scale per row and weights (E, X, Y), strides (X*Y, 1, X), scales (E, 1, Y)."""
    (a, scales_a), (b, scales_b) = rows, weights
    spec = grouped_rows_hopper.SPEC if is_requested(a.device) else grouped_rows.SPEC
    return spec(a, b.mT, offs, scales_a, scales_b)[0]


def contract(of_a: Quantized, of_b: Quantized, offs: Tensor, rows: int, out: Tensor | None = None) -> Tensor:
    """Return the product over rows of what ``colwise`` makes of ``rows`` rows, groups aligned to ALIGNMENT.

    ``out``: bfloat16 or float32 to add the product to, and to return.
    """
    (a, scales_a), (b, scales_b) = of_a, of_b
    if not is_traced(a) and not rows:
        zeros = torch.zeros(offs.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16, device=a.device)
        return zeros if out is None else out
    inputs = a, b, offs, scales_a, scales_b, ALIGNMENT, out
    spec = grouped_contraction_hopper.SPEC if is_requested(a.device) else grouped_contraction.SPEC
    return spec(*inputs, outputs=None if out is None else (out,))[0]


def multiply_bf16(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Return the product of rows and weights (E, X, Y), stored either way."""
    if is_traced(rows) or not rows.shape[0]:
        return rows.new_empty(rows.shape[0], weights.shape[2])
    if rows.is_cpu:
        return grouped_rows.SPEC.reference(rows, weights.mT, offs, None, None)[0]  # type: ignore[no-any-return]
    out = torch._grouped_mm(rows, weights, offs=offs)
    zero_rows(out, offs)  # torch leaves rows past the last group unwritten
    return out


def contract_bf16(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return the product over rows."""
    if is_traced(a) or not a.shape[0]:
        return a.new_zeros(offs.shape[0], a.shape[1], b.shape[1])
    if a.is_cpu:
        return grouped_contraction.SPEC.reference(a, b, offs, None, None, 1, None)[0]  # type: ignore[no-any-return]
    out = torch._grouped_mm(a.t(), b, offs=offs)
    if running_arch(a.device) not in _ZEROS_EMPTY_GROUPS:
        zero_empty_groups(out, offs)
    return out


@triton.jit(do_not_specialize=["M", "G"])  # both change every step and must not cause a recompilation
def zero_rows_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Share the blocks of elements past the last group among the programs."""
    first = tl.load(offs_ptr + G - 1)
    x_ptr += first.to(tl.int64) * K
    count = (M - first).to(tl.int64) * K
    for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_SIZE), tl.num_programs(0)):
        places = block.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        tl.store(x_ptr + places, tl.zeros((BLOCK_SIZE,), x_ptr.dtype.element_ty), mask=places < count)


@triton.jit(do_not_specialize=["G"])
def zero_empty_groups_kernel(
    x_ptr: tl.tensor,  # (G, N, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    N: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Share a group's blocks among every G-th program; do nothing where the group has rows."""
    group = tl.program_id(0) % G
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    if tl.load(offs_ptr + group) <= start:
        count = tl.cast(N, tl.int64) * K
        x_ptr += group * count
        for block in tl.range(tl.program_id(0) // G, tl.cdiv(count, BLOCK_SIZE), tl.num_programs(0) // G):
            places = block.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            tl.store(x_ptr + places, tl.zeros((BLOCK_SIZE,), x_ptr.dtype.element_ty), mask=places < count)


def zero_rows(x: Tensor, offs: Tensor) -> None:
    """Write zeros into the rows of ``x`` past the last group, which are few."""
    launch_kernel(zero_rows_kernel, PROGRAMS, (x, offs), (*x.shape, offs.shape[0]), (), ZEROS)


def zero_empty_groups(x: Tensor, offs: Tensor) -> None:
    """Write zeros into ``x``, (G, N, K), where a group has no row."""
    G, N, K = x.shape
    launch_kernel(zero_empty_groups_kernel, 16 * G, (x, offs), (N, K, G), (), ZEROS)


# Bias of each expert


def add_bias(out: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Return ``out`` (M, N) with ``bias`` (E, N), in its dtype, on the rows of each group; rows past the last stay.

    A product with a matrix that has a single one in each row: it is exact, its gradient is the sum over each group in
    one GEMM, and no value of ``offs`` is read on the host. An index by expert would sort all rows in its backward pass.
    """
    rows = rows_of_experts(out.shape[0], offs, out.dtype)
    return torch.addmm(out, rows, bias.to(out.dtype)).to(out.dtype)  # autocast may have another


def rows_of_experts(rows: int, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (rows, E): 1 where a row is of an expert's group, else 0."""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype).unsqueeze(1)
    starts = torch.nn.functional.pad(offs[:-1], (1, 0))
    return ((row >= starts) & (row < offs)).to(dtype)
