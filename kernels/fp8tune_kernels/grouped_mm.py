"""FP8 grouped GEMM with its gradients: drop-in for ``torch._grouped_mm`` of token rows and expert weights.

    forward            out    = A @ B_t           ``rowwise-2d`` of A,       ``colwise-3d`` of B_t
    input gradient     grad_A = grad @ B          ``rowwise-2d`` of grad,    ``transpose-3d`` of B_t
    weight gradient    grad_B = grad.t() @ A      ``colwise-dual`` of both: one scale a column of each group

    A     (M, K), row-major, bfloat16, float16 or float32: the rows of expert after expert
    B_t   (E, K, N), strides (K*N, 1, K): weights that lie as (E, N, K), given as ``weights.transpose(1, 2)``
    offs  (E,), int32: the end row of each expert's group, non-decreasing, at most M
    out   (M, N), bfloat16

Each operand of each of the three GEMMs is quantized along the dim that is contracted, with power-of-two scales. All of
it is operators of ``torch.library``, so that ``torch.compile(fullgraph=True)`` traces it, and none waits for the
device, so that CUDA graphs capture it. What is kept for the backward pass is A and B_t as they were given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8tune_kernels import token_groups
from fp8tune_kernels.colwise import quantize_colwise
from fp8tune_kernels.colwise_3d import quantize_colwise_3d
from fp8tune_kernels.colwise_dual import quantize_colwise_dual
from fp8tune_kernels.ops import IN_DTYPES, check_matrix, check_offsets
from fp8tune_kernels.rowwise_2d import quantize_rowwise_2d
from fp8tune_kernels.scaled_gemm import GROUP_ALIGNMENT, scaled_grouped_gemm
from fp8tune_kernels.transpose_3d_reduction import quantize_transpose_3d_reduction as quantize_transposed

__all__ = ["autocast", "check_operands", "fp8_grouped_mm", "quantize_transposed"]

GEMM_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""What scaled grouped GEMMs multiply: the first on NVIDIA and gfx950, the second on gfx942."""


def fp8_grouped_mm(
    A: torch.Tensor,
    B_t: torch.Tensor,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    float8_dtype: torch.dtype | None = None,
    pad_token_groups: bool = False,
) -> torch.Tensor:
    """``A[rows of e] @ B_t[e]`` for every expert e, multiplied in FP8; differentiable in A and B_t.

    ``pad_token_groups``: group sizes may be anything, zero included. Each group is padded to a positive multiple of 16
    rows on the device and the output's padding taken out again, without waiting for it; rows past ``offs[-1]`` come out
    as zeros. Without it the weight gradient wants sizes that are such multiples already (a GPU asserts it on the
    device), and rows past ``offs[-1]`` hold what they hold after ``torch._grouped_mm``: nothing specified, in out and
    in A's gradient.

    ``float8_dtype`` None is the format of the running arch (e4m3fnuz on gfx942, else e4m3fn). Under autocast A and B_t
    are cast to its dtype first. On a CPU the GEMMs are a loop over groups on the same FP8 codes.

    Raises ValueError, before any launch, naming the argument: a wrong dtype, rank, stride or device; K or N that is no
    multiple of 16; another number of groups than experts; an ``out_dtype`` or ``float8_dtype`` the GEMM does not have.
    """
    A, B_t = autocast(A, B_t)
    check_operands(A, B_t, offs, out_dtype, GROUP_ALIGNMENT)
    _check_float8_dtype(float8_dtype)
    if not pad_token_groups:
        return _apply(A, B_t, offs, float8_dtype)
    padded, padded_offs = token_groups.pad(A, offs, GROUP_ALIGNMENT)
    out = _apply(padded, B_t, padded_offs, float8_dtype)
    return token_groups.unpad(out, offs, A.shape[0], GROUP_ALIGNMENT)


class _Fp8GroupedMM(torch.autograd.Function):
    """The three GEMMs, for groups whose sizes are positive multiples of 16."""

    @staticmethod
    def forward(
        ctx: Any, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.save_for_backward(A, B_t, offs)
        ctx.float8_dtype = float8_dtype
        q_A, scales_A = quantize_rowwise_2d(A, float8_dtype=float8_dtype)
        q_B, scales_B = quantize_colwise_3d(B_t, float8_dtype=float8_dtype)
        return scaled_grouped_gemm(q_A, q_B, scales_A.squeeze(1), scales_B.squeeze(1), offs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        A, B_t, offs = ctx.saved_tensors
        grad = grad.contiguous()
        grad_A = grad_B_t = None
        if ctx.needs_input_grad[0]:
            grad_A = _input_gradient(grad, B_t, offs, ctx.float8_dtype).to(A.dtype)
        if ctx.needs_input_grad[1]:
            grad_B_t = _weight_gradient(grad, A, offs, ctx.float8_dtype).to(B_t.dtype)
        return grad_A, grad_B_t, None, None


_apply: Callable[..., torch.Tensor] = _Fp8GroupedMM.apply


def _input_gradient(
    grad: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype | None
) -> torch.Tensor:
    """``grad @ B`` of each expert: (M, N) and (E, K, N) -> (M, K), bfloat16."""
    q_grad, scales_grad = quantize_rowwise_2d(grad, float8_dtype=float8_dtype)
    q_B, scales_B = quantize_transposed(B_t, float8_dtype=float8_dtype)
    return scaled_grouped_gemm(q_grad, q_B, scales_grad.squeeze(1), scales_B.squeeze(1), offs)


def _weight_gradient(
    grad: torch.Tensor, A: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype | None
) -> torch.Tensor:
    """``grad.t() @ A`` of each group: (M, N) and (M, K) -> (E, K, N), strides (K*N, 1, K) as B_t has them, bfloat16."""
    if grad.dtype == A.dtype:
        q_grad, scales_grad, q_A, scales_A = quantize_colwise_dual(grad, A, offs, float8_dtype=float8_dtype)
    else:  # A in float32 is quantized from float32
        q_grad, scales_grad = quantize_colwise(grad, offs, float8_dtype=float8_dtype)
        q_A, scales_A = quantize_colwise(A, offs, float8_dtype=float8_dtype)
    return scaled_grouped_gemm(q_grad.t(), q_A, scales_grad, scales_A, offs).transpose(1, 2)


def autocast(A: torch.Tensor, B_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the dtype of the autocast region around the call, if there is one."""
    if not torch.is_autocast_enabled(A.device.type):
        return A, B_t
    dtype = torch.get_autocast_dtype(A.device.type)
    return A.to(dtype), B_t.to(dtype)


def check_operands(
    A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, multiple: int
) -> None:
    """Raise ValueError, naming the argument, for what no scaled grouped GEMM takes. K and N are such multiples."""
    check_matrix("A", A)
    _check_weights(B_t, A)
    if offs.device != A.device:
        raise ValueError(f"offs is on {offs.device}, wanted {A.device} as A")
    check_offsets(offs, A.device)
    _, K, N = B_t.shape
    if offs.shape[0] != B_t.shape[0]:
        raise ValueError(f"offs has {offs.shape[0]} groups, wanted {B_t.shape[0]}: one for each expert of B_t")
    if A.shape[1] != K:
        raise ValueError(f"A has shape {tuple(A.shape)}, wanted (M, {K}): K of B_t, which is {tuple(B_t.shape)}")
    if K % multiple or N % multiple or not K or not N:
        raise ValueError(f"B_t has K={K} and N={N}, wanted multiples of {multiple}")
    if out_dtype != torch.bfloat16:
        raise ValueError(f"out_dtype is {out_dtype}, wanted torch.bfloat16: the scaled grouped GEMM writes no other")


def _check_weights(B_t: torch.Tensor, A: torch.Tensor) -> None:
    if B_t.dim() != 3:
        raise ValueError(f"B_t has shape {tuple(B_t.shape)}, wanted three dimensions (E, K, N)")
    if B_t.dtype not in IN_DTYPES:
        raise ValueError(f"B_t is {B_t.dtype}, wanted {', '.join(str(dtype) for dtype in IN_DTYPES)}")
    if B_t.device != A.device:
        raise ValueError(f"B_t is on {B_t.device}, wanted {A.device} as A")
    if not B_t.mT.is_contiguous():
        _, K, N = B_t.shape
        wanted = f"({K * N}, 1, {K}): weights that lie as (E, N, K), given as weights.transpose(1, 2)"
        raise ValueError(f"B_t has strides {B_t.stride()}, wanted {wanted}")


def _check_float8_dtype(wanted: torch.dtype | None) -> None:
    """What of it the device decides, the quantization kernels check."""
    if wanted is not None and wanted not in GEMM_DTYPES:
        raise ValueError(f"float8_dtype is {wanted}, wanted None or {' or '.join(map(str, GEMM_DTYPES))}")
