"""Weights that lie as (E, K, N), row-major, as gpt-oss keeps them: which kernel writes which codes, without a copy.

    forward           codes along K, (E, K, N), strides (K*N, 1, K), scales (E, 1, N)    ``transpose-3d`` of the view
    input gradient    codes along N, (E, N, K), strides (K*N, 1, N), scales (E, 1, K)    ``colwise-3d`` of the view
    weight gradient   A.t() @ grad, (E, K, N), row-major: its operands change places

The kernels read (E, K, N) with strides (K*N, 1, K). ``B_t.mT`` is such a view, of weights with N inputs and K outputs.
So each kernel writes what the other one writes for weights that lie as (E, N, K).
"""

from __future__ import annotations

from torch import Tensor, dtype

from fp8tune_kernels.gemm import passes
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.quantize import colwise, colwise_3d, transpose_3d_atomic
from fp8tune_kernels.quantize.colwise_transpose_3d import quantize_colwise_transpose_3d
from fp8tune_kernels.runtime.ops import run
from fp8tune_kernels.spec import KernelSpec, bucket

__all__ = ["both_codes", "columns", "forward_codes", "input_gradient_codes", "is_row_major"]

Codes = tuple[Tensor, Tensor]


def is_row_major(B_t: Tensor) -> bool:
    """Whether ``B_t`` lies as its shape says, (E, K, N)."""
    return B_t.is_contiguous()


def forward_codes(B_t: Tensor, method: int, float8_dtype: dtype) -> Codes | None:
    """What the forward pass multiplies; None where the pass makes or needs none."""
    return _codes(transpose_3d_atomic.SPEC, B_t, method, float8_dtype)


def input_gradient_codes(B_t: Tensor | None, method: int, float8_dtype: dtype) -> Codes | None:
    """What the input gradient multiplies; None where the pass makes or needs none."""
    return None if B_t is None else _codes(colwise_3d.SPEC, B_t, method, float8_dtype)


def columns(x: Tensor, offs: Tensor, float8_dtype: dtype) -> Codes:
    """Codes of rows as a weight gradient multiplies them."""
    q, scales = run(
        colwise.SPEC, (bucket(x.shape[0]), x.shape[1], offs.shape[0]), (x, offs, float8_dtype, True, ALIGNMENT)
    )
    return q, scales


def both_codes(B_t: Tensor, float8_dtype: dtype | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales for the forward pass and for the input gradient, by one read, of weights that lie either way."""
    if not is_row_major(B_t):
        return quantize_colwise_transpose_3d(B_t, float8_dtype=float8_dtype)
    along_N, scales_N, along_K, scales_K = quantize_colwise_transpose_3d(B_t.mT, float8_dtype=float8_dtype)
    return along_K, scales_K, along_N, scales_N


def _codes(spec: KernelSpec, B_t: Tensor, method: int, float8_dtype: dtype) -> Codes | None:
    if method in (passes.BF16_TORCH, passes.BF16) or not is_row_major(B_t):
        return None
    q, scales = run(spec, tuple(B_t.mT.shape), (B_t.mT, float8_dtype, True))
    return q, scales
