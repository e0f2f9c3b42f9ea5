"""What the two ``transpose-3d`` kernels share: their contract, its plain torch reference, and the kernel.

    amax[e, k]      = max over n of |w[e, k, n]|
    scales[e, 0, k] = scale of amax[e, k]                      see :mod:`.arithmetic`
    q[e, n, k]      = fp8(clamp(w[e, k, n] * scales[e, 0, k]))

    w       (E, K, N), strides (K*N, 1, K), bfloat16, float16 or float32     see :mod:`.weights`
    q       (E, N, K), strides (N*K, 1, N): the column-major right operand of the input gradient's scaled grouped GEMM
    scales  (E, 1, K), float32; a GEMM is given the reciprocals

In memory this is ``colwise`` of E groups of N rows, but that each expert is transposed for itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ..edges import declared, edge
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors
from . import panels
from .arithmetic import FP8_MAX, reference_cast, reference_scale
from .panels import quantize_columns
from .tiles import Matrix, Options

__all__ = ["edges", "launch_columns", "outputs", "reference"]


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


def launch_columns(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch; where panels are asked for, after one that zeroes what they count in."""
    w, float8_dtype, power_of_two = inputs
    E, K, N = w.shape
    named = {"BLOCK_SIZE": config["BLOCK_SIZE_K"], "BLOCK_SIZE_ITER": config["BLOCK_SIZE_N"], "LEAD": config["LEAD"]}
    if programs := panels.programs(named, E * N, K, E, w.device):
        tensors = (w, *outputs, panels.work_for(named, K, E, w))
        constants = (FP8_MAX[float8_dtype], power_of_two)
        launch_kernel(transpose_3d_kernel, programs, tensors, (E, N, K), constants, panels.options(config))


def reference(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """The contract in plain torch, an expert at a time: all of them in float32 would not fit beside large weights."""
    q, scales = outputs(w, float8_dtype, power_of_two)
    for rows, codes, scale in zip(w.mT, q, scales, strict=True):
        amax = rows.abs().amax(0).float() if len(rows) else torch.zeros_like(scale[0])
        scale.copy_(reference_scale(amax, float8_dtype, power_of_two))
        codes.copy_(reference_cast(rows, scale, float8_dtype))
    return q, scales


def outputs(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    E, K, N = w.shape
    q = torch.empty_strided((E, N, K), (N * K, 1, N), dtype=float8_dtype, device=w.device)
    return q, torch.empty(E, 1, K, dtype=torch.float32, device=w.device)


edges = declared(
    edge("a block and 16 more, NaN", "nan", E=2, N=272, K=80),
    edge("a few rows, infinity", "infinite", E=2, N=48, K=272),
    edge("zeros", "zeros", E=1, N=16, K=48),
    edge("one row, huge values", "huge", E=3, N=1, K=37),
    edge("one column, tiny values", "tiny", E=2, N=272, K=1),
    edge("a block and one more past an aligned address", offset=1, E=2, N=129, K=65),
)
"""Of kernels whose tiles do not depend on N."""
