"""MXFP8 grouped GEMM with its gradients: blocks of 32 elements with E8M0 scales, drop-in for ``torch._grouped_mm``.

    forward            out    = A @ B_t           ``mxfp8-dim0`` of A and of the weights: blocks along K
    input gradient     grad_A = grad @ B          ``mxfp8-dim0`` of grad, ``mxfp8-dim1-3d`` of the weights: along N
    weight gradient    grad_B = grad.t() @ A      ``mxfp8-dim1`` of both: along the rows, 32 of one group

Operands are those of :mod:`fp8tune_kernels.gemm.grouped_mm`, but K and N are multiples of 32, and so are group sizes.
:func:`mxfp8_path` names the path of a device. ``native``, on sm_100: ``torch._scaled_grouped_mm`` on blocked scales;
the layout is tested byte for byte, the GEMM has not been run. ``emulated``, anywhere else: codes times scales, exactly,
in bfloat16, and a bfloat16 grouped GEMM, which says nothing of MXFP8's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arches import MXFP8_GEMM_ARCHES
from ..quantize.mxfp8_arithmetic import MX_BLOCK, check_scale_mode
from ..quantize.mxfp8_dim0 import quantize_mxfp8_dim0
from ..quantize.mxfp8_dim1 import quantize_mxfp8_dim1
from ..quantize.mxfp8_dim1_3d import quantize_mxfp8_dim1_3d
from ..runtime.lookup import running_arch
from ..runtime.once import differentiable_once
from . import mxfp8_blocked, token_groups
from .grouped_mm import checked_operands, finished
from .scaled_gemm import checked_offsets
from .shards import on_shards

__all__ = ["multiply", "mxfp8_grouped_mm", "mxfp8_path", "operands", "quantize"]

Tensors = tuple[Tensor, ...]


@on_shards
def mxfp8_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scale_mode: str = "rceil",
    pad_token_groups: bool = False,
) -> Tensor:
    """``A[rows of e] @ B_t[e]`` for every expert e in MXFP8 (e4m3fn); differentiable in A and B_t.

    ``scale_mode``: ``rceil`` (nothing is clamped) or ``floor``. The other arguments and the ValueErrors are those of
    :func:`fp8tune_kernels.fp8_grouped_mm`. Groups are padded to 32 rows, so that no block straddles two of them.
    """
    A, B_t, offs = checked_operands(A, B_t, offs, bias, out_dtype, MX_BLOCK)
    check_scale_mode(scale_mode)
    if pad_token_groups:
        out = token_groups.multiply_padded(lambda A, offs: _apply(A, B_t, offs, scale_mode), A, offs, MX_BLOCK)
    else:
        out = _apply(A, B_t, checked_offsets(offs, A.shape[0]), scale_mode)
    return finished(out, offs, bias, out_dtype)


def mxfp8_path(device: torch.device) -> str:
    """``native`` or ``emulated``: what :func:`mxfp8_grouped_mm` is on a device, for every table that shows it."""
    return "native" if running_arch(device) in MXFP8_GEMM_ARCHES else "emulated"


# As torch.compiler.assume_constant_result does it, which takes two seconds to import.
mxfp8_path._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Mxfp8GroupedMM(torch.autograd.Function):
    """The three GEMMs, for groups whose sizes are positive multiples of 32."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B_t: Tensor, offs: Tensor, scale_mode: str) -> Tensor:
        ctx.save_for_backward(A, B_t, offs)
        ctx.scale_mode = scale_mode
        q_A, scales_A = quantize(quantize_mxfp8_dim0, A, scale_mode)
        return multiply(operands(q_A, scales_A, *_codes_along_rows(B_t, scale_mode), offs), offs)

    @staticmethod
    @differentiable_once("mxfp8_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        A, B_t, offs = ctx.saved_tensors
        grad = grad.contiguous()
        grad_A = grad_B_t = None
        if ctx.needs_input_grad[0]:
            q_grad, scales_grad = quantize(quantize_mxfp8_dim0, grad, ctx.scale_mode)
            of_B = _codes_along_rows(B_t.mT, ctx.scale_mode)
            grad_A = multiply(operands(q_grad, scales_grad, *of_B, offs), offs).to(A.dtype)
        if ctx.needs_input_grad[1]:
            offs = checked_offsets(offs, grad.shape[0], MX_BLOCK)
            q_grad, scales_grad = quantize(quantize_mxfp8_dim1, grad, ctx.scale_mode)
            q_A, scales_A = quantize(quantize_mxfp8_dim1, A, ctx.scale_mode)
            if B_t.is_contiguous():  # row-major (E, K, N)
                grad_B_t = multiply(operands(q_A.t(), scales_A, q_grad, scales_grad, offs), offs).to(B_t.dtype)
            else:
                grad_B = multiply(operands(q_grad.t(), scales_grad, q_A, scales_A, offs), offs)
                grad_B_t = grad_B.transpose(1, 2).to(B_t.dtype)
        return grad_A, grad_B_t, None, None


_apply: Callable[..., Tensor] = _Mxfp8GroupedMM.apply


def _codes_along_rows(b: Tensor, scale_mode: str) -> tuple[Tensor, Tensor]:
    """Codes of (E, X, Y) in blocks along X, and their scales (E, Y, X/32): whichever of X and Y is contiguous."""
    if b.is_contiguous():
        return quantize(quantize_mxfp8_dim1_3d, b, scale_mode)
    E, X, Y = b.shape
    codes, scales = quantize(quantize_mxfp8_dim0, b.mT.reshape(E * Y, X), scale_mode)
    return codes.view(E, Y, X).mT, scales.view(E, Y, -1)


def quantize(kernel: Any, x: Tensor, scale_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Codes, e4m3fn, and scales by one of the ``quantize_mxfp8_...`` wrappers."""
    codes, scales = kernel(x, float8_dtype=torch.float8_e4m3fn, scale_mode=scale_mode)
    return codes, scales


def operands(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor) -> Tensors:
    """What :func:`multiply` takes, of codes and scales.

    Rows (M, K), scales (M, K/32), by experts (E, K, N), strides (K*N, 1, K), scales (E, N, K/32); or, contracted over
    the rows of groups, (N, M), scales (N, M/32), by (M, K), strides (1, M), scales (K, M/32).
    """
    if mxfp8_path(a.device) == "emulated":
        return _values(a, scale_a), _values(b.mT, scale_b).mT
    if b.dim() == 3:
        return a, b, mxfp8_blocked.of_row_groups(scale_a, offs), mxfp8_blocked.of_experts(scale_b)
    return a, b, mxfp8_blocked.of_column_groups(scale_a, offs), mxfp8_blocked.of_column_groups(scale_b, offs)


def multiply(given: Tensors, offs: Tensor) -> Tensor:
    """The GEMM of each group, bfloat16: codes with blocked scales, or the bfloat16 values that stand for them.

    Of rows (M, N); of groups, contracted over their rows, (G, N, K).
    """
    if len(given) == 2:
        return torch._grouped_mm(*given, offs=offs)
    a, b, scale_a, scale_b = given
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes times the scales of their blocks of 32 along the last dim, bfloat16: exact, four bits times a power of two
    (but where a block is so small or so large that bfloat16 ends). Its strides are those of a row-major tensor."""
    each = scales.float().repeat_interleave(MX_BLOCK, -1)[..., : codes.shape[-1]]
    return (codes.float() * each).to(torch.bfloat16).contiguous()
