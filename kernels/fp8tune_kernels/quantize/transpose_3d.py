"""The two ``transpose-3d`` kernels share this: their contract, its plain torch reference, and the kernel.

    amax[e, k]      = max over n of |w[e, k, n]|
    scales[e, 0, k] = scale of amax[e, k]                      see :mod:`.arithmetic`
    q[e, n, k]      = fp8(clamp(w[e, k, n] * scales[e, 0, k]))

    w       (E, K, N), strides (K*N, 1, K), bfloat16, float16 or float32     see :mod:`.weights`
    q       (E, N, K), strides (N*K, 1, N): the column-major right operand of the input gradient's scaled grouped GEMM
    scales  (E, 1, K), float32; a GEMM is given the reciprocals

In memory this is ``colwise`` of E groups of N rows, but that each expert is transposed for itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import edge
from ..runtime import declare
from ..runtime.declare import Call, Config
from . import panels
from .arithmetic import reference_cast, reference_scale
from .panels import quantize_columns
from .tiles import Matrix, Options


@triton.jit(do_not_specialize=["E"])  # so that the binary that few experts check is the one that many run
def transpose_3d_kernel(
    w_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    q_ptr: tl.tensor,  # (E, N, K), strides (N*K, 1, N)
    scales_ptr: tl.tensor,  # (E, 1, K)
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.panels
    E: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    LEAD: tl.constexpr,
    num_warps: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Either form of :mod:`.panels`: E groups of N rows, each transposed within its own N*K codes."""
    quantize_columns(
        Matrix(w_ptr, None, q_ptr, scales_ptr, E * N, K, E, N, tl.cast(N, tl.int64) * (K - 1), 1),
        work_ptr,
        tl.program_id(0),
        Options(FP8_MAX, POWER_OF_TWO, BLOCK_SIZE_K, BLOCK_SIZE_N, LEAD, num_warps),
        num_stages,
    )


def launch_columns(config: Config, call: Call) -> None:
    """Launch the kernel; with panels, after zeroing what they count in."""
    named = {"BLOCK_SIZE": config["BLOCK_SIZE_K"], "BLOCK_SIZE_ITER": config["BLOCK_SIZE_N"], "LEAD": config["LEAD"]}
    if programs := panels.programs(named, call.E * call.N, call.K, call.E, call.device):
        work = panels.work_for(named, call.K, call.E, call.w)
        call.run(transpose_3d_kernel, programs, panels.options(config), work=work)


def reference(call: Call) -> None:
    """Quantize an expert at a time in plain torch: all in float32 would not fit beside large weights."""
    for rows, q, scales in zip(call.w.mT, call.q, call.scales, strict=True):
        amax = rows.abs().amax(0).float() if len(rows) else torch.zeros_like(scales[0])
        scales.copy_(reference_scale(amax, call.float8_dtype, call.power_of_two))
        q.copy_(reference_cast(rows, scales, call.float8_dtype))


OUTPUTS = (declare.fp8("q", "E", "N", "K", transposed=True), declare.float32("scales", "E", "1", "K"))

EDGES = (
    edge("a block and 16 more, NaN", "nan", E=2, N=272, K=80),
    edge("a few rows, infinity", "infinite", E=2, N=48, K=272),
    edge("zeros", "zeros", E=1, N=16, K=48),
    edge("one row, huge values", "huge", E=3, N=1, K=37),
    edge("one column, tiny values", "tiny", E=2, N=272, K=1),
    edge("a block and one more past an aligned address", offset=1, E=2, N=129, K=65),
)
"""Edges of kernels whose tiles do not depend on N."""
