"""``rowwise-factored``: quantize an output's gradient row by row, with the scales of the weights folded in.

    y[m, k]   = x[m, k] * factor(column_scales[g, k])         for m in group g; x[m, k] in rows of no group
    scales[m] = scale of max over k of |y[m, k]|              see :mod:`.arithmetic`
    q[m, k]   = fp8(clamp(y[m, k] * scales[m]))

    x              (M, K), row-major, bfloat16, float16 or float32
    offs           (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    column_scales  G*K contiguous values of float32, such as (G, 1, K): the scales of ``colwise-3d``, powers of two
    q              (M, K), row-major: the left operand of a grouped GEMM that contracts over K
    scales         (M, 1), float32; a GEMM is given the reciprocals

``factor`` is that of :mod:`.factors`. Products are float32, and exact unless they leave its range: they are then
infinite, subnormal or zero. Maxima below 1e-12 have the scale of 1e-12, as anywhere.

It is the cast of the input gradient's left operand, whose right one is the transposed codes of the weights. Row by row
as ``rowwise-2d``, with the factors of the row's group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl

from fp8tune_kernels.catalog import SPANS
from fp8tune_kernels.edges import declared, edge, long_tail, past_half
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize import colwise, rowwise_2d
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, quantize, reference_cast, reference_scale, scale_of
from fp8tune_kernels.quantize.factors import check_scales, factor_of, random_powers, reference_factor
from fp8tune_kernels.runtime.checks import check_matrix, check_offsets, fp8_dtype_for
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import SCALE_MODES, KernelSpec, NamedInts, Problem, bucket

__all__ = ["SPEC", "quantize_rowwise_factored"]


@triton.jit(do_not_specialize=["M", "G"])  # they change every step: neither may recompile anything
def rowwise_factored_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    column_scales_ptr: tl.tensor,  # (G, K)
    q_ptr: tl.tensor,  # (M, K), row-major
    scales_ptr: tl.tensor,  # (M, 1)
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ONE_PASS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program: BLOCK_SIZE rows, whichever groups they belong to.

    Where one tile of BLOCK_SIZE_ITER columns spans the row it is read once and kept in registers; else the program
    walks the row twice, the second time backwards, so that the columns read last are found in the cache.
    """
    rows = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    in_rows = (rows < M)[:, None]
    places = rows.to(tl.int64)[:, None] * K
    groups = _groups_of_rows(offs_ptr, rows, G)
    in_groups = (groups < G)[:, None]
    factors = column_scales_ptr + groups.to(tl.int64)[:, None] * K

    columns = tl.arange(0, BLOCK_SIZE_ITER)[None, :]
    if ONE_PASS:
        y = _divided(x_ptr + places + columns, factors + columns, in_rows & (columns < K), in_groups)
        largest = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    else:
        largest = tl.zeros((BLOCK_SIZE,), tl.int32)
        for column in tl.range(0, K, BLOCK_SIZE_ITER, num_stages=num_stages):
            at = column + columns
            y = _divided(x_ptr + places + at, factors + at, in_rows & (at < K), in_groups)
            largest = tl.maximum(largest, tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    scale = scale_of(largest.to(tl.float32, bitcast=True), FP8_MAX, POWER_OF_TWO)
    tl.store(scales_ptr + rows, scale, mask=rows < M)

    if ONE_PASS:
        q = quantize(y, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
        tl.store(q_ptr + places + columns, q, mask=in_rows & (columns < K))
    else:
        tiles = tl.cdiv(K, BLOCK_SIZE_ITER)
        for tile in tl.range(0, tiles, num_stages=num_stages):
            at = (tiles - 1 - tile) * BLOCK_SIZE_ITER + columns
            y = _divided(x_ptr + places + at, factors + at, in_rows & (at < K), in_groups)
            q = quantize(y, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
            tl.store(q_ptr + places + at, q, mask=in_rows & (at < K))


@triton.jit
def _groups_of_rows(offs_ptr: tl.tensor, rows: tl.tensor, G: tl.tensor) -> tl.tensor:
    """The group of each row, which is how many end at or before it; G of rows of no group."""
    groups = tl.zeros_like(rows)
    for first in range(0, G, 128):
        each = first + tl.arange(0, 128)
        ends = tl.load(offs_ptr + each, mask=each < G, other=0x7FFFFFFF)
        groups += tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
    return groups


@triton.jit
def _divided(at: tl.tensor, scales_at: tl.tensor, inside: tl.tensor, in_groups: tl.tensor) -> tl.tensor:
    """y of a tile. Rows of a program that have one group read the same factors, from the cache but once."""
    factor = factor_of(tl.load(scales_at, mask=inside & in_groups, other=1.0, eviction_policy="evict_last"))
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32) * factor


def quantize_rowwise_factored(
    x: torch.Tensor,
    offs: torch.Tensor,
    column_scales: torch.Tensor,
    *,
    float8_dtype: torch.dtype | None = None,
    power_of_two: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` over the column scales row by row; returns ``(q, scales)`` as the module and the package say."""
    return _operator(x, offs, column_scales, float8_dtype, power_of_two)


def reference(
    x: torch.Tensor, offs: torch.Tensor, column_scales: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool
) -> Tensors:
    """The same in plain torch, a group at a time; reads ``offs`` on the host."""
    (M, K), G = x.shape, offs.shape[0]
    q, scales = outputs(x, offs, column_scales, float8_dtype, power_of_two)
    start = 0
    for group, end in enumerate([*offs.tolist(), M]):
        y = x[start:end].float()
        if group < G:
            y = y * reference_factor(column_scales.reshape(G, K)[group])
        largest = y.abs().amax(1, keepdim=True) if K else y.new_zeros(len(y), 1)
        scales[start:end] = reference_scale(largest, float8_dtype, power_of_two)
        q[start:end] = reference_cast(y, scales[start:end], float8_dtype)
        start = end
    return q, scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, offs, column_scales, float8_dtype, power_of_two)`` of a problem."""
    M, K, G = (problem.shape[dim] for dim in "MKG")
    x, column_scales = random_matrix(problem, M, K, device), random_powers(problem, (G, 1, K), device, -6, 12)
    is_power_of_two = problem.scale_mode == "power-of-two"
    return x, offsets(problem, device), column_scales, dtype_named(problem.fp8_dtype), is_power_of_two


def constrain(inputs: Inputs) -> None:
    """Scales are those of usual weights: what else was written into them would be in every code, and hide the rest."""
    scales = inputs[2]
    if scales.device.type != "meta":
        scales[~((scales > 2.0**-32) & (scales < 2.0**32))] = 1.0


def outputs(
    x: torch.Tensor, offs: torch.Tensor, column_scales: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool
) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    return rowwise_2d.outputs(x, float8_dtype, power_of_two)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch: a program for every BLOCK_SIZE rows, a tile no wider than the row needs."""
    x, offs, column_scales, float8_dtype, power_of_two = inputs
    M, K = x.shape
    width = min(config["BLOCK_SIZE_ITER"], 1 << max(K - 1, 0).bit_length())
    if programs := -(-M // config["BLOCK_SIZE"]):
        constants = (FP8_MAX[float8_dtype], power_of_two, width >= K)
        tensors, tile = (x, offs, column_scales, *outputs), {**config, "BLOCK_SIZE_ITER": width}
        launch_kernel(rowwise_factored_kernel, programs, tensors, (M, K, offs.shape[0]), constants, tile)


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The output's gradient, ``(M, N)``; ``G = E``."""
    yield NamedInts(M=row["M"], K=row["N"], G=row["E"])


SPEC = KernelSpec(
    name="rowwise-factored",
    axes=rowwise_2d.SPEC.axes,
    default=NamedInts(BLOCK_SIZE=1, BLOCK_SIZE_ITER=8192, num_warps=4, num_stages=1),
    key=colwise.SPEC.key,
    span=SPANS["rowwise-factored"],
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=constrain,
    interpreted={"M": 29, "K": 5003, "G": 3},  # no block divides either; rows stay longer than the shorter tiles
    invalid=rowwise_2d.invalid,
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block of rows and one more, long tails", routing="balanced", M=17, K=long_tail("K"), G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=29, K=past_half("K", 16), G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=7, K=past_half("K", 16), G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=5, K=48, G=3),
        edge("one column, tiny values", "tiny", routing="ragged", M=11, K=1, G=2),
        edge(
            "a block of columns and one more past an aligned address",
            offset=1,
            routing="ragged",
            M=5,
            K=past_half("K"),
            G=2,
        ),
        edge("rows of no group", routing="empty", M=29, K=80, G=4),
    ),
    routed=True,
    layout_sizes={"K": 400, "G": 8},
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def arguments(
    x: torch.Tensor,
    offs: torch.Tensor,
    column_scales: torch.Tensor,
    float8_dtype: torch.dtype | None,
    power_of_two: bool,
) -> Inputs:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    check_scales("column_scales", column_scales, offs.shape[0] * x.shape[1], x.device)
    return x, offs, column_scales, fp8_dtype_for(x.device, float8_dtype), power_of_two


def key(x: torch.Tensor, offs: torch.Tensor, *rest: object) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1], offs.shape[0]


_operator = register(SPEC, quantize_rowwise_factored, arguments, key)
