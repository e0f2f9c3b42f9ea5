"""``colwise-factored``: quantize groups of rows column by column, by given maxima, with scales of rows folded in.

    y[m, k]         = x[m, k] / row_scales[m]
    scales[g*K + k] = scale of amax[g*K + k]                            see :mod:`.arithmetic`
    q[place[g] + m - start[g], k] = fp8(y[m, k] * scales[g*K + k])      for m in group g

    x           (M, K), row-major, bfloat16, float16 or float32
    offs        (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    row_scales  M contiguous values of float32, such as (M, 1): the scales of :mod:`.rowwise_transposed`
    amax        (G*K,), float32, group-major: max over rows m of group g of |y[m, k]|, of :mod:`.rowwise_factored`
    q           (P, K), strides (1, P), P = padded_rows(M, G, alignment): the layout of ``colwise``'s codes
                place[g + 1] = place[g] + max(1, ceil(size[g] / alignment)) * alignment
    scales      (G*K,), float32, group-major; a GEMM is given the reciprocals

Zeros follow a group's codes up to the next multiple of the alignment; what lies past the last group's is not written.
Divided as :mod:`.factors` says. Codes are not specified where ``amax`` is less than the maximum.

It is the cast of the weight gradient's left operand, whose right one is the transposed codes of the rows that were
multiplied. As maxima are given, nothing is read twice: a program casts a tile of BLOCK_SIZE_M by BLOCK_SIZE_K.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.groups import taken_rows
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize import colwise, row_blocks, rowwise_factored
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, quantize, reference_cast, reference_scale, scale_of
from fp8tune_kernels.quantize.factors import check_factors, divided, random_factors, reciprocal, restore_factors
from fp8tune_kernels.quantize.limits import idle_columns, too_many_shared_bytes, wrong_tile
from fp8tune_kernels.quantize.row_blocks import BlockOptions, Rows, block_of, groups_of, load, store_transposed
from fp8tune_kernels.quantize.tiles import of_any_layout, stride_of_columns
from fp8tune_kernels.runtime.checks import check_alignment, check_matrix, check_offsets, fp8_dtype_for
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import SCALE_MODES, DeviceLimits, KernelSpec, NamedInts, Problem, bucket

__all__ = ["SPEC", "quantize_colwise_factored"]

ALIGNMENT = 128
"""What ``grouped-contraction`` wants of its codes."""


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def colwise_factored_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    row_scales_ptr: tl.tensor,  # (M,)
    amax_ptr: tl.tensor,  # (G * K,), group-major
    q_ptr: tl.tensor,  # (P, K), strides (1, P)
    scales_ptr: tl.tensor,  # (G * K,), group-major
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of the groups in the codes
    GROUPS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """One program: one tile, those of a block side by side. Rows of no group have none."""
    stride = stride_of_columns(M, G, ALIGNMENT)
    _cast_tile(
        Rows(x_ptr, offs_ptr, q_ptr, scales_ptr, q_ptr, None, row_scales_ptr, amax_ptr, M, K, G, stride, ALIGNMENT),
        BlockOptions(FP8_MAX, POWER_OF_TWO, GROUPS, BLOCK_SIZE_M, BLOCK_SIZE_K),
    )


@triton.jit
def _cast_tile(rows: Rows, options: BlockOptions) -> None:
    across = tl.cdiv(rows.K, options.BLOCK_SIZE_K)
    block = block_of(rows, groups_of(rows, options), tl.program_id(0) // across, options)
    if block.group < rows.G:
        columns = tl.program_id(0) % across * options.BLOCK_SIZE_K + tl.arange(0, options.BLOCK_SIZE_K)
        lanes = tl.arange(0, options.BLOCK_SIZE_M)
        x = load(rows, block, columns, options)
        at, exist = block.group.to(tl.int64) * rows.K + columns, columns < rows.K
        amax = tl.load(rows.column_amax_ptr + at, mask=exist, other=0.0)
        scale = scale_of(amax, options.FP8_MAX, options.POWER_OF_TWO)
        tl.store(rows.scales_ptr + at, scale, mask=exist & (block.row == 0))
        inside = lanes < block.left
        factor = reciprocal(tl.load(rows.row_scales_ptr + block.first + lanes, mask=inside, other=1.0))
        factor, scale = of_any_layout(factor), of_any_layout(scale)
        dtype: tl.constexpr = rows.q_ptr.dtype.element_ty
        if block.left >= options.BLOCK_SIZE_M:
            q = quantize(x.to(tl.float32) * factor[:, None], scale[None, :], dtype, options.FP8_MAX)
            store_transposed(rows, block, columns, q, options)
        else:  # a scale that is NaN makes no zeros of what follows a group
            q = quantize(x.to(tl.float32) * factor[:, None], scale[None, :], dtype, options.FP8_MAX)
            codes = tl.where(inside[:, None], q.to(tl.uint8, bitcast=True), 0).to(tl.uint8)
            store_transposed(rows, block, columns, codes.to(dtype, bitcast=True), options)


def quantize_colwise_factored(
    x: torch.Tensor,
    offs: torch.Tensor,
    row_scales: torch.Tensor,
    amax: torch.Tensor,
    *,
    float8_dtype: torch.dtype | None = None,
    power_of_two: bool = True,
    alignment: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each group of rows of ``x`` over the row scales column by column; returns ``(q, scales)``.

    ``alignment``: of the groups in ``q``, a power of two from 16 on.
    """
    return _operator(x, offs, row_scales, amax, float8_dtype, power_of_two, alignment)


def reference(
    x: torch.Tensor,
    offs: torch.Tensor,
    row_scales: torch.Tensor,
    amax: torch.Tensor,
    float8_dtype: torch.dtype,
    power_of_two: bool,
    alignment: int = ALIGNMENT,
) -> Tensors:
    """The same in plain torch, a group at a time; reads ``offs`` on the host. Zeros where a launch writes nothing."""
    G, K = offs.shape[0], x.shape[1]
    q, scales = outputs(x, offs, row_scales, amax, float8_dtype, power_of_two, alignment)
    scales.copy_(reference_scale(amax, float8_dtype, power_of_two))
    q.zero_()
    start, place = 0, 0
    for group, end in enumerate(offs.tolist()):
        y = divided(x[start:end], row_scales.reshape(-1, 1)[start:end])
        q[place : place + end - start] = reference_cast(y, scales.view(G, K)[group], float8_dtype)
        start, place = end, place + taken_rows(end - start, alignment)
    return q, scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, offs, row_scales, amax, float8_dtype, power_of_two)`` of a problem, and its alignment, if it has one."""
    M, K, G = (problem.shape[dim] for dim in "MKG")
    x, row_scales = random_matrix(problem, M, K, device), random_factors(problem, (M, 1), device, 2)
    amax = torch.empty(G * K, dtype=torch.float32, device=device)
    alignment = [problem.shape["alignment"]] if "alignment" in problem.shape else []
    is_power_of_two = problem.scale_mode == "power-of-two"
    given = x, offsets(problem, device), row_scales, amax, dtype_named(problem.fp8_dtype), is_power_of_two, *alignment
    constrain(given)
    return given


def constrain(inputs: Inputs) -> None:
    """The maxima are those of the values."""
    x, offs, row_scales, amax = inputs[:4]
    if x.device.type != "meta":
        restore_factors(row_scales)
        amax.copy_(rowwise_factored.reference_amax(x, offs, row_scales))


def outputs(
    x: torch.Tensor,
    offs: torch.Tensor,
    row_scales: torch.Tensor,
    amax: torch.Tensor,
    float8_dtype: torch.dtype,
    power_of_two: bool,
    alignment: int = ALIGNMENT,
) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    return colwise.outputs(x, offs, float8_dtype, power_of_two, alignment)


def unwritten(inputs: Inputs, outputs: Tensors) -> None:
    """Write zeros past the last group's multiple of the alignment."""
    _, offs, *_, alignment = (*inputs, ALIGNMENT)[:7]
    colwise.clear_past_the_groups(outputs[0], offs, alignment)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch."""
    x, offs, row_scales, amax, float8_dtype, power_of_two, alignment = (*inputs, ALIGNMENT)[:7]
    (M, K), G = x.shape, offs.shape[0]
    blocks = row_blocks.most_blocks(config, len(outputs[0]), G)
    if programs := blocks * -(-K // config["BLOCK_SIZE_K"]):
        tensors = (x, offs, row_scales, amax, *outputs)
        constants = (FP8_MAX[float8_dtype], power_of_two, alignment, row_blocks.groups_constant(G))
        launch_kernel(colwise_factored_kernel, programs, tensors, (M, K, G), constants, config)


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None."""
    tile = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_K"]
    return (
        wrong_tile(config, tile, limits)
        or too_many_shared_bytes(2 * tile, "to transpose", limits)
        or idle_columns(config["BLOCK_SIZE_K"], shape["K"])
    )


SPEC = KernelSpec(
    name="colwise-factored",
    axes={
        "BLOCK_SIZE_M": (32, 64, 128),
        "BLOCK_SIZE_K": (32, 64, 128, 256),
        "num_warps": (1, 2, 4, 8, 16),
        "num_stages": (1,),
    },
    default=NamedInts(BLOCK_SIZE_M=64, BLOCK_SIZE_K=128, num_warps=4, num_stages=1),
    key=colwise.SPEC.key,
    problems=rowwise_factored.problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=constrain,
    unwritten=unwritten,
    interpreted={"M": 157, "K": 101, "G": 3},  # no block divides either; several groups stay several
    invalid=invalid,
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block and one more", routing="balanced", M=513, K=144, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, K=48, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, K=48, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, K=48, G=3),
        edge("one column, tiny values", "tiny", routing="ragged", M=67, K=1, G=2),
        edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, K=129, G=2),
        edge("groups aligned to less than a block, NaN", "nan", routing="ragged", M=277, K=48, G=4, alignment=16),
    ),
    routed=True,
    bytes_moved=lambda shape: 3 * shape["M"] * shape["K"],  # rows between groups are this layout's, no group needs them
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def arguments(
    x: torch.Tensor,
    offs: torch.Tensor,
    row_scales: torch.Tensor,
    amax: torch.Tensor,
    float8_dtype: torch.dtype | None,
    power_of_two: bool,
    alignment: int = 128,
) -> Inputs:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    check_factors("row_scales", row_scales, x.shape[0], x.device)
    check_factors("amax", amax, offs.shape[0] * x.shape[1], x.device)
    check_alignment(alignment)
    if alignment == 1:
        raise ValueError("alignment is 1, wanted a power of two from 16 on")
    return x, offs, row_scales, amax, fp8_dtype_for(x.device, float8_dtype), power_of_two, alignment


def key(x: torch.Tensor, offs: torch.Tensor, *rest: object) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1], offs.shape[0]


_operator = register(SPEC, quantize_colwise_factored, arguments, key)
