"""``rowwise-colwise``: quantize an ``(M, K)`` matrix to FP8 as ``rowwise-2d`` and as ``colwise`` do, in one read.

    scales_rows[m]           = scale of the maximum over k of |x[m, k]|         see :mod:`.arithmetic`
    scales_columns[g*K + k]  = scale of the maximum over rows m of group g of |x[m, k]|
    q_rows[m, k]             = fp8(clamp(x[m, k] * scales_rows[m]))
    q_columns[m, k]          = fp8(clamp(x[m, k] * scales_columns[g*K + k]))    for m in group g; 0 in rows of no group

    x               (M, K), row-major, bfloat16, float16 or float32
    offs            (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    q_rows          (M, K), row-major: the left operand of a scaled grouped GEMM that contracts over K
    scales_rows     (M, 1), float32
    q_columns       (M, K), strides (1, M rounded up to 16): the column-major operand of one that contracts over rows
    scales_columns  (G*K,), float32, group-major; a GEMM is given the reciprocals

With an ``alignment`` q_columns is (P, K), as :mod:`.colwise` has it; rows have no alignment.

Of A, the halves are for the forward pass of a grouped GEMM and its weight gradient; of the output's gradient, for the
input's and the weights' gradient. Read once where L2 holds a group.

Scratch: about ``4*(G*K + M)`` bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime import declare
from ..runtime.declare import Call, Config
from . import both_ways, colwise, panels, rowwise_2d
from .both_ways import quantize_both_ways
from .tiles import Matrix, Options, stride_of_columns


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def rowwise_colwise_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    q_rows_ptr: tl.tensor,  # (M, K), row-major
    row_scales_ptr: tl.tensor,  # (M, 1)
    q_columns_ptr: tl.tensor,  # (M, K), strides (1, M rounded up to 16); or, aligned, (P, K), strides (1, P)
    column_scales_ptr: tl.tensor,  # (G * K,), group-major
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.both_ways
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of the groups in the codes
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    LEAD: tl.constexpr,
    num_warps: tl.constexpr,
) -> None:
    """Turns of :mod:`.both_ways`."""
    quantize_both_ways(
        Matrix(
            x_ptr, offs_ptr, q_columns_ptr, column_scales_ptr, M, K, G, stride_of_columns(M, G, ALIGNMENT), 0, ALIGNMENT
        ),
        q_rows_ptr,
        row_scales_ptr,
        work_ptr,
        Options(FP8_MAX, POWER_OF_TWO, BLOCK_SIZE, BLOCK_SIZE_ITER, LEAD, num_warps),
    )


def launch(config: Config, call: Call) -> None:
    """Launch the kernel, after zeroing what it counts in."""
    work = both_ways.work_for(call.M, call.K, call.G, call.device)
    programs = both_ways.programs(config, len(call.q_columns), call.K, call.G, call.device)
    call.run(rowwise_colwise_kernel, programs, panels.options(config), work=work)


def columns(call: Call) -> Call:
    """Return the call of ``colwise`` that is half of this."""
    return call.replace(q=call.q_columns, scales=call.column_scales)


def reference(call: Call) -> None:
    """Quantize both ways in plain torch; reads ``offs`` on the host."""
    rowwise_2d.reference(call.replace(q=call.q_rows, scales=call.row_scales))
    colwise.reference(columns(call))


SPEC = declare.kernel(
    name="rowwise-colwise",
    arguments=(declare.matrix("x", "M", "K"), declare.OFFSETS, *colwise.OPTIONS),
    outputs=(
        declare.fp8("q_rows", "M", "K"),
        declare.float32("row_scales", "M", "1"),
        declare.fp8("q_columns", allocate=colwise.allocate),
        declare.float32("column_scales", "G * K"),
    ),
    launch=launch,
    reference=reference,
    unwritten=lambda call: colwise.clear_past_the_groups(columns(call)),
    axes=both_ways.AXES,
    default={"BLOCK_SIZE": 128, "BLOCK_SIZE_ITER": 64, "LEAD": 512, "num_warps": 2, "num_stages": 1, "maxnreg": 0},
    key=colwise.KEY,
    problems=colwise.PROBLEMS,
    interpreted=colwise.INTERPRETED,
    invalid=lambda config, shape, limits: both_ways.invalid(config, shape["K"], limits),
    edges=colwise.EDGES,
)

quantize_rowwise_colwise = SPEC.define()
