"""``rowwise-transposed``: quantize an ``(M, K)`` matrix row by row, and write the same codes transposed as well.

    amax[m]   = max over k of |x[m, k]|
    scales[m] = scale of amax[m]                               see :mod:`.arithmetic`
    q[m, k]   = fp8(clamp(x[m, k] * scales[m]))                as ``rowwise-2d`` writes it
    q_transposed[place[g] + m - start[g], k] = q[m, k]         for m in group g

    x             (M, K), row-major, bfloat16, float16 or float32
    offs          (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    q             (M, K), row-major: the left operand of a grouped GEMM that contracts over K
    scales        (M, 1), float32; a GEMM is given the reciprocals
    q_transposed  (P, K), strides (1, P), P = padded_rows(M, G, alignment): the layout of ``colwise``'s codes
                  place[g + 1] = place[g] + max(1, ceil(size[g] / alignment)) * alignment

Zeros follow a group's codes up to the next multiple of the alignment; what lies past the last group's is not written.
Rows of no group have codes in ``q`` alone.

A GEMM that contracts over rows reads ``q_transposed`` without scales: those of the rows are factors of its other
operand (:mod:`.colwise_factored`). Each value is read once (:mod:`.row_blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.groups import padded_rows, taken_rows
from fp8tune_kernels.quantize import colwise, panels, row_blocks, rowwise_2d
from fp8tune_kernels.quantize.arithmetic import FP8_MAX
from fp8tune_kernels.quantize.row_blocks import BlockOptions, Rows, quantize_blocks
from fp8tune_kernels.quantize.tiles import stride_of_columns
from fp8tune_kernels.runtime.checks import check_alignment, check_matrix, check_offsets, fp8_dtype_for
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import SCALE_MODES, KernelSpec, NamedInts

__all__ = ["ALIGNMENT", "SPEC", "quantize_rowwise_transposed"]

ALIGNMENT = 128
"""What ``grouped-contraction`` wants of its codes."""


@triton.jit(do_not_specialize=["M", "G", "most"])  # they change every step: none may recompile anything
def rowwise_transposed_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    q_ptr: tl.tensor,  # (M, K), row-major
    scales_ptr: tl.tensor,  # (M, 1)
    transposed_ptr: tl.tensor,  # (P, K), strides (1, P)
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.row_blocks
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    most: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of the groups in the transposed codes
    GROUPS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    HELD: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Either form of :mod:`.row_blocks`."""
    stride = stride_of_columns(M, G, ALIGNMENT)
    quantize_blocks(
        Rows(x_ptr, offs_ptr, q_ptr, scales_ptr, transposed_ptr, None, None, None, M, K, G, stride, ALIGNMENT),
        work_ptr,
        most,
        BlockOptions(FP8_MAX, POWER_OF_TWO, GROUPS, BLOCK_SIZE_M, BLOCK_SIZE_K),
        HELD,
        num_stages,
    )


def quantize_rowwise_transposed(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    float8_dtype: torch.dtype | None = None,
    power_of_two: bool = True,
    alignment: int = 128,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize ``x`` row by row; returns ``(q, scales, q_transposed)`` as the module and the package say.

    ``alignment``: of the groups in ``q_transposed``, a power of two from 16 on. Scratch, where tiles are held: about
    ``4*M`` bytes, and 4 a tile.
    """
    return _operator(x, offs, float8_dtype, power_of_two, alignment)


def reference(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool, alignment: int = ALIGNMENT
) -> Tensors:
    """The same in plain torch; reads ``offs`` on the host. Zeros where a launch writes nothing."""
    q, scales, transposed = outputs(x, offs, float8_dtype, power_of_two, alignment)
    found = rowwise_2d.reference(x, float8_dtype, power_of_two)
    q.copy_(found[0])
    scales.copy_(found[1])
    transposed.zero_()
    start, place = 0, 0
    for end in offs.tolist():
        transposed[place : place + end - start] = q[start:end]
        start, place = end, place + taken_rows(end - start, alignment)
    return q, scales, transposed


def outputs(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool, alignment: int = ALIGNMENT
) -> Tensors:
    """Uninitialised ``q``, ``scales`` and ``q_transposed``."""
    K, P = x.shape[1], padded_rows(x.shape[0], offs.shape[0], alignment)
    transposed = torch.empty_strided((P, K), (1, P), dtype=float8_dtype, device=x.device)
    return *rowwise_2d.outputs(x, float8_dtype, power_of_two), transposed


def unwritten(inputs: Inputs, outputs: Tensors) -> None:
    """Write zeros past the last group's multiple of the alignment."""
    _, offs, _, _, alignment = (*inputs, ALIGNMENT)[:5]
    colwise.clear_past_the_groups(outputs[2], offs, alignment)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch; where tiles are held, after one that zeroes what they count in."""
    x, offs, float8_dtype, power_of_two, alignment = (*inputs, ALIGNMENT)[:5]
    (M, K), G, P = x.shape, offs.shape[0], outputs[2].shape[0]
    most = row_blocks.most_blocks(config, P, G)
    tensors = (x, offs, *outputs, row_blocks.work_for(config, M, K, most, offs))
    constants = (FP8_MAX[float8_dtype], power_of_two, alignment, row_blocks.groups_constant(G))
    programs = row_blocks.programs(config, P, K, G, x.device)
    launch_kernel(rowwise_transposed_kernel, programs, tensors, (M, K, G, most), constants, panels.options(config))


SPEC = KernelSpec(
    name="rowwise-transposed",
    axes=row_blocks.AXES,
    default=NamedInts(BLOCK_SIZE_M=64, BLOCK_SIZE_K=256, HELD=1, num_warps=4, num_stages=1, maxnreg=0),
    key=colwise.SPEC.key,
    problems=lambda row: iter([NamedInts(M=row["M"], K=row["K"], G=row["E"])]),
    inputs=colwise.inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    unwritten=unwritten,
    interpreted={"M": 157, "K": 301, "G": 3},  # no block divides either; several groups stay several
    invalid=lambda config, shape, limits: row_blocks.invalid(config, ALIGNMENT, shape["K"], limits),
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block and one more", routing="balanced", M=513, K=528, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, K=528, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, K=80, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, K=48, G=3),
        edge("one column, tiny values", "tiny", routing="ragged", M=67, K=1, G=2),
        edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, K=129, G=2),
        edge("groups aligned to less than a block", routing="ragged", M=277, K=48, G=4, alignment=16),
    ),
    routed=True,
    bytes_moved=lambda shape: 4 * shape["M"] * shape["K"],  # rows between groups are this layout's, no group needs them
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def arguments(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype | None, power_of_two: bool, alignment: int = 128
) -> Inputs:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    check_alignment(alignment)
    if alignment == 1:
        raise ValueError("alignment is 1, wanted a power of two from 16 on")
    return x, offs, fp8_dtype_for(x.device, float8_dtype), power_of_two, alignment


_operator = register(SPEC, quantize_rowwise_transposed, arguments, colwise.key)
