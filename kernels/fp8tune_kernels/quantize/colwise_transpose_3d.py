"""``colwise-transpose-3d``: quantize expert weights to FP8 as ``colwise-3d`` and ``transpose-3d`` do, in one read.

    w              (E, K, N), strides (K*N, 1, K), bfloat16, float16 or float32     see :mod:`.weights`
    q              (E, K, N), strides (K*N, 1, K), with scales (E, 1, N): reduced over K, as ``colwise-3d`` writes them
    q_transposed   (E, N, K), strides (N*K, 1, N), with scales (E, 1, K): reduced over N, as ``transpose-3d`` does

The right operands of the forward's scaled grouped GEMM and of the input gradient's. In memory w is a row-major (E*N, K)
matrix in E equal groups of rows, quantized row by row and column by column (:mod:`.both_ways`).

Scratch: about ``4*E*(K + N)`` bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits
from . import both_ways, colwise_3d, panels, transpose_3d, weights
from .both_ways import quantize_both_ways
from .tiles import Matrix, Options


@triton.jit(do_not_specialize=["E"])  # so that the binary that few experts check is the one that many run
def colwise_transpose_3d_kernel(
    w_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    q_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    scales_ptr: tl.tensor,  # (E, 1, N)
    q_transposed_ptr: tl.tensor,  # (E, N, K), strides (N*K, 1, N)
    scales_transposed_ptr: tl.tensor,  # (E, 1, K)
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.both_ways
    E: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    LEAD: tl.constexpr,
    num_warps: tl.constexpr,
) -> None:
    """Turns of :mod:`.both_ways`: E groups of N rows, each transposed within its own N*K codes."""
    quantize_both_ways(
        Matrix(w_ptr, None, q_transposed_ptr, scales_transposed_ptr, E * N, K, E, N, tl.cast(N, tl.int64) * (K - 1), 1),
        q_ptr,
        scales_ptr,
        work_ptr,
        Options(FP8_MAX, POWER_OF_TWO, BLOCK_SIZE, BLOCK_SIZE_ITER, LEAD, num_warps),
    )


def launch(config: Config, call: Call) -> None:
    """Launch the kernel, after zeroing what it counts in."""
    work = both_ways.work_for(call.E * call.N, call.K, call.E, call.device)
    programs = both_ways.programs(config, call.E * call.N, call.K, call.E, call.device)
    call.run(colwise_transpose_3d_kernel, programs, panels.options(config), work=work)


def reference(call: Call) -> None:
    """Quantize both ways in plain torch, an expert at a time."""
    colwise_3d.reference(call)
    transpose_3d.reference(call.replace(q=call.q_transposed, scales=call.scales_transposed))


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    if config["BLOCK_SIZE_ITER"] >= 2 * shape["N"]:
        return f"{config['BLOCK_SIZE_ITER']} rows a tile for {shape['N']}: half of the threads idle"
    return both_ways.invalid(config, shape["K"], limits)


SPEC = declare.kernel(
    name="colwise-transpose-3d",
    arguments=weights.ARGUMENTS,
    outputs=(
        *colwise_3d.OUTPUTS,
        declare.fp8("q_transposed", "E", "N", "K", transposed=True),
        declare.float32("scales_transposed", "E", "1", "K"),
    ),
    launch=launch,
    reference=reference,
    axes=both_ways.AXES,
    default={"BLOCK_SIZE": 128, "BLOCK_SIZE_ITER": 64, "LEAD": 192, "num_warps": 2, "num_stages": 1, "maxnreg": 0},
    key=weights.KEY,
    problems=weights.PROBLEMS,
    interpreted={"E": 2, "N": 301, "K": 101},  # no block divides either; an expert has several pieces
    invalid=invalid,
    edges=transpose_3d.EDGES,
)

quantize_colwise_transpose_3d = SPEC.define()
