"""What the two ``transpose-3d`` kernels share: their contract, its plain torch reference, and how a tile is handled.

    amax[e, k]      = max over n of |w[e, k, n]|
    scales[e, 0, k] = scale of amax[e, k]                      see :mod:`fp8tune_kernels.arithmetic`
    q[e, n, k]      = fp8(clamp(w[e, k, n] * scales[e, 0, k]))

    w       (E, K, N), strides (K*N, 1, K), bfloat16, float16 or float32     see :mod:`fp8tune_kernels.weights`
    q       (E, N, K), strides (N*K, 1, N): the column-major right operand of the input gradient's scaled grouped GEMM
    scales  (E, 1, K), float32; a GEMM is given the reciprocals

K is contiguous in w and N in q, so a tile is read along one and written along the other. The maxima are over the
strided axis: unlike ``colwise`` on E groups of N rows, no group straddles a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8tune_kernels.arithmetic import quantize, reference_cast, reference_scale

__all__ = ["cast_tile", "load_tile", "outputs", "reference"]


@triton.jit
def load_tile(w_columns: tl.tensor, rows: tl.tensor, N: tl.tensor, K: tl.tensor, in_columns: tl.tensor) -> tl.tensor:
    """These rows of ``w_columns``, pointers to a block of one expert's columns of K; zero outside the expert."""
    return tl.load(w_columns + rows.to(tl.int64)[:, None] * K, mask=(rows < N)[:, None] & in_columns, other=0.0)


@triton.jit
def cast_tile(
    q_columns: tl.tensor,
    rows: tl.tensor,
    w: tl.tensor,
    scale: tl.tensor,
    N: tl.tensor,
    in_columns: tl.tensor,
    FP8_MAX: tl.constexpr,
) -> None:
    """Quantize a tile and write it transposed; ``q_columns`` points to the first row of its columns."""
    q = quantize(w, scale[None, :], q_columns.dtype.element_ty, FP8_MAX)
    tl.store(q_columns + rows[:, None], q, mask=(rows < N)[:, None] & in_columns)


def reference(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract in plain torch, an expert at a time: all of them in float32 would not fit beside large weights."""
    q, scales = outputs(w, float8_dtype, power_of_two)
    for rows, codes, scale in zip(w.mT, q, scales, strict=True):
        amax = rows.abs().amax(0).float() if len(rows) else torch.zeros_like(scale[0])
        scale.copy_(reference_scale(amax, float8_dtype, power_of_two))
        codes.copy_(reference_cast(rows, scale, float8_dtype))
    return q, scales


def outputs(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised ``q`` and ``scales``."""
    E, K, N = w.shape
    q = torch.empty_strided((E, N, K), (N * K, 1, N), dtype=float8_dtype, device=w.device)
    return q, torch.empty(E, 1, K, dtype=torch.float32, device=w.device)
