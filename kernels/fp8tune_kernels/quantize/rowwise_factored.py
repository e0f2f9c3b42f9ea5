"""``rowwise-factored``: quantize an output's gradient row by row, with the scales of the weights folded in.

    y[m, k]       = x[m, k] / column_scales[g, k]               for m in group g; x[m, k] in rows of no group
    scales[m]     = scale of max over k of |y[m, k]|            see :mod:`.arithmetic`
    q[m, k]       = fp8(clamp(y[m, k] * scales[m]))
    amax[g*K + k] = max over rows m of group g of |x[m, k] / row_scales[m]|; 0 of an empty group

    x              (M, K), row-major, bfloat16, float16 or float32
    offs           (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    column_scales  G*K contiguous values of float32, such as (G, 1, K): the scales of :mod:`.weights_transposed`
    row_scales     M contiguous values of float32, such as (M, 1): the scales of :mod:`.rowwise_transposed`
    q              (M, K), row-major: the left operand of a grouped GEMM that contracts over K
    scales         (M, 1), float32; a GEMM is given the reciprocals
    amax           (G*K,), float32, group-major: what :mod:`.colwise_factored` casts by

Divided as :mod:`.factors` says. Rows of zeros have scales of 2**48: what they divide is far below all else. Maxima
below 1e-12 have the scale of 1e-12, as anywhere.

It is the cast of the input gradient's left operand, whose right one is the transposed codes of the weights. The maxima
are for the weight gradient: they come with the only read, so that its cast needs no second one. Each value is read once
(:mod:`.row_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize import colwise, panels, row_blocks, rowwise_2d
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, reference_cast, reference_scale
from fp8tune_kernels.quantize.factors import check_factors, divided, random_factors, restore_factors
from fp8tune_kernels.quantize.row_blocks import BlockOptions, Rows, quantize_blocks
from fp8tune_kernels.runtime.checks import check_matrix, check_offsets, fp8_dtype_for
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import SCALE_MODES, KernelSpec, NamedInts, Problem, bucket

__all__ = ["SPEC", "problems", "quantize_rowwise_factored", "reference_amax"]


@triton.jit(do_not_specialize=["M", "G", "most"])  # they change every step: none may recompile anything
def rowwise_factored_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    column_scales_ptr: tl.tensor,  # (G, K)
    row_scales_ptr: tl.tensor,  # (M,)
    q_ptr: tl.tensor,  # (M, K), row-major
    scales_ptr: tl.tensor,  # (M, 1)
    amax_ptr: tl.tensor,  # (G * K,), int32: zeros
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.row_blocks
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    most: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    HELD: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Either form of :mod:`.row_blocks`."""
    quantize_blocks(
        Rows(x_ptr, offs_ptr, q_ptr, scales_ptr, None, column_scales_ptr, row_scales_ptr, amax_ptr, M, K, G, K, 0),
        work_ptr,
        most,
        BlockOptions(FP8_MAX, POWER_OF_TWO, GROUPS, BLOCK_SIZE_M, BLOCK_SIZE_K),
        HELD,
        num_stages,
    )


def quantize_rowwise_factored(
    x: torch.Tensor,
    offs: torch.Tensor,
    column_scales: torch.Tensor,
    row_scales: torch.Tensor,
    *,
    float8_dtype: torch.dtype | None = None,
    power_of_two: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize ``x`` over the column scales row by row; returns ``(q, scales, amax)`` as the module says.

    Scratch, where tiles are held: about ``4*M`` bytes, and 4 a tile.
    """
    return _operator(x, offs, column_scales, row_scales, float8_dtype, power_of_two)


def reference(
    x: torch.Tensor,
    offs: torch.Tensor,
    column_scales: torch.Tensor,
    row_scales: torch.Tensor,
    float8_dtype: torch.dtype,
    power_of_two: bool,
) -> Tensors:
    """The same in plain torch, a group at a time; reads ``offs`` on the host."""
    (M, K), G = x.shape, offs.shape[0]
    q, scales, amax = outputs(x, offs, column_scales, row_scales, float8_dtype, power_of_two)
    amax.copy_(reference_amax(x, offs, row_scales))
    start = 0
    for group, end in enumerate([*offs.tolist(), M]):
        rows = x[start:end]
        y = divided(rows, column_scales.reshape(G, K)[group]) if group < G else rows.float()
        largest = y.abs().amax(1, keepdim=True) if K else y.new_zeros(len(y), 1)
        scales[start:end] = reference_scale(largest, float8_dtype, power_of_two)
        q[start:end] = reference_cast(y, scales[start:end], float8_dtype)
        start = end
    return q, scales, amax


def reference_amax(x: torch.Tensor, offs: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
    """``amax`` in plain torch."""
    K, G = x.shape[1], offs.shape[0]
    amax = x.new_zeros(G, K, dtype=torch.float32)
    start = 0
    for group, end in enumerate(offs.tolist()):
        if start < end:
            amax[group] = divided(x[start:end], row_scales.reshape(-1, 1)[start:end]).abs().amax(0)
        start = end
    return amax.view(-1)


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, offs, column_scales, row_scales, float8_dtype, power_of_two)`` of a problem."""
    M, K, G = (problem.shape[dim] for dim in "MKG")
    factors = random_factors(problem, (G, 1, K), device, 1), random_factors(problem, (M, 1), device, 2)
    is_power_of_two = problem.scale_mode == "power-of-two"
    offs = offsets(problem, device)
    return random_matrix(problem, M, K, device), offs, *factors, dtype_named(problem.fp8_dtype), is_power_of_two


def outputs(
    x: torch.Tensor,
    offs: torch.Tensor,
    column_scales: torch.Tensor,
    row_scales: torch.Tensor,
    float8_dtype: torch.dtype,
    power_of_two: bool,
) -> Tensors:
    """Uninitialised ``q``, ``scales`` and ``amax``."""
    amax = torch.empty(offs.shape[0] * x.shape[1], dtype=torch.float32, device=x.device)
    return *rowwise_2d.outputs(x, float8_dtype, power_of_two), amax


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch, after those that zero the maxima and, where tiles are held, what they count in."""
    x, offs, column_scales, row_scales, float8_dtype, power_of_two = inputs
    (M, K), G = x.shape, offs.shape[0]
    q, scales, amax = outputs
    most = row_blocks.most_blocks(config, M, G)
    work = row_blocks.work_for(config, M, K, most, offs)
    tensors = (x, offs, column_scales, row_scales, q, scales, amax.zero_().view(torch.int32), work)
    constants = (FP8_MAX[float8_dtype], power_of_two, row_blocks.groups_constant(G))
    programs = row_blocks.programs(config, M, K, G, x.device)
    launch_kernel(rowwise_factored_kernel, programs, tensors, (M, K, G, most), constants, panels.options(config))


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The output's gradient, ``(M, N)``; ``G = E``."""
    yield NamedInts(M=row["M"], K=row["N"], G=row["E"])


SPEC = KernelSpec(
    name="rowwise-factored",
    axes={**row_blocks.AXES, "BLOCK_SIZE_M": (8, 16, 32, 64)},
    default=NamedInts(BLOCK_SIZE_M=32, BLOCK_SIZE_K=256, HELD=1, num_warps=4, num_stages=1, maxnreg=0),
    key=colwise.SPEC.key,
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=lambda inputs: restore_factors(*inputs[2:4]),
    interpreted={"M": 157, "K": 301, "G": 3},  # no block divides either; several groups stay several
    invalid=lambda config, shape, limits: row_blocks.invalid(config, shape["M"], shape["K"], limits),
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block and one more", routing="balanced", M=513, K=528, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, K=528, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, K=80, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, K=48, G=3),
        edge("one column, tiny values", "tiny", routing="ragged", M=67, K=1, G=2),
        edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, K=129, G=2),
    ),
    routed=True,
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def arguments(
    x: torch.Tensor,
    offs: torch.Tensor,
    column_scales: torch.Tensor,
    row_scales: torch.Tensor,
    float8_dtype: torch.dtype | None,
    power_of_two: bool,
) -> Inputs:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    (M, K), G = x.shape, offs.shape[0]
    check_factors("column_scales", column_scales, G * K, x.device)
    check_factors("row_scales", row_scales, M, x.device)
    return x, offs, column_scales, row_scales, fp8_dtype_for(x.device, float8_dtype), power_of_two


def key(x: torch.Tensor, offs: torch.Tensor, *rest: object) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1], offs.shape[0]


_operator = register(SPEC, quantize_rowwise_factored, arguments, key)
