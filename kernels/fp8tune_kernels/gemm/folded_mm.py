"""The folded recipe of ``fp8_grouped_mm``: the second codes of A and of the weights are byte transposes of the first.

With a scale a row, A = Aq / s, and with a scale an expert and output column, B[e] = Bq[e] / w[e]. So

    out    = A @ B_t                = (Aq @ Bq_t) / s / w                 as by default, to the same bytes
    grad_A = grad @ B               = (grad / w) @ Bq                     w folded into the rows of grad
    grad_B = grad.t() @ A           = (grad / s).t() @ Aq                 s folded into the columns of grad

A and B_t are cast once, along what the forward pass contracts, and written twice; none of them has maxima of columns.
Only grad is cast twice. Bytes that move for an element of bfloat16, and what is held between the passes:

            by default                      folded                                          held by default, folded
    A       3 rowwise-2d + 3 colwise        4 rowwise-transposed                            2, 1
    grad    3 rowwise-2d + 3 colwise        3 rowwise-factored + 3 colwise-factored         0, 0
    B_t     3 colwise-3d + 3 transpose-3d   4 weights-transposed                            0 as it is the parameter, 1

``colwise`` and ``transpose-3d`` read their input twice, the second time from L2 if it still has it; nothing here does.

The idea is published (inclusionAI/linghe). Codes have the scale of a row where the default gives each group and column
its own: a value that is small in its row, such as a channel beside one of outliers, has fewer bits in grad_B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.gemm.methods import FP8_ONLY
from fp8tune_kernels.quantize.colwise_3d import quantize_colwise_3d
from fp8tune_kernels.quantize.colwise_factored import quantize_colwise_factored
from fp8tune_kernels.quantize.rowwise_factored import quantize_rowwise_factored
from fp8tune_kernels.quantize.rowwise_transposed import quantize_rowwise_transposed
from fp8tune_kernels.quantize.weights_transposed import quantize_weights_transposed
from fp8tune_kernels.runtime.once import differentiable_once

__all__ = ["folded_grouped_mm"]


def folded_grouped_mm(
    A: Tensor, B_t: Tensor, offs: Tensor, float8_dtype: torch.dtype | None, *codes_B: Tensor
) -> Tensor:
    """``fp8_grouped_mm(recipe="folded")`` of operands that were checked.

    ``codes_B``: what ``weights-transposed`` gave of B_t, where it was cast before.
    """
    is_recorded = torch.is_grad_enabled()
    return _apply(
        A, B_t, offs, float8_dtype, is_recorded and A.requires_grad, is_recorded and B_t.requires_grad, *codes_B
    )


class _FoldedGroupedMM(torch.autograd.Function):
    """The three passes, by the operators of :mod:`.grouped_mm` on codes that are made here. Saves codes and scales."""

    @staticmethod
    def forward(
        ctx: Any,
        A: Tensor,
        B_t: Tensor,
        offs: Tensor,
        float8_dtype: torch.dtype | None,
        wants_A: bool,
        wants_B: bool,
        *codes_B: Tensor,
    ) -> Tensor:
        q_A = scales_A = transposed_A = transposed_B = None
        if wants_B:
            q_A, scales_A, transposed_A = quantize_rowwise_transposed(
                A, offs, float8_dtype=float8_dtype, alignment=ALIGNMENT
            )
        if len(codes_B):  # a compiler knows no truth of a tuple of tensors
            q_B, scales_B, transposed_B = codes_B
        elif wants_A:
            q_B, scales_B, transposed_B = quantize_weights_transposed(B_t, float8_dtype=float8_dtype)
        else:
            q_B, scales_B = quantize_colwise_3d(B_t, float8_dtype=float8_dtype)
        ctx.save_for_backward(transposed_A, scales_A, transposed_B if wants_A else None, scales_B, offs)
        ctx.float8_dtype, ctx.dtypes, ctx.K = float8_dtype, (A.dtype, B_t.dtype), A.shape[1]
        out: Tensor = torch.ops.fp8tune.grouped_mm_forward(
            A, B_t, offs, float8_dtype, FP8_ONLY, q_A, scales_A, q_B, scales_B
        )
        return out

    @staticmethod
    @differentiable_once("fp8_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transposed_A, scales_A, transposed_B, scales_B, offs = ctx.saved_tensors
        wants_A, wants_B, *others = ctx.needs_input_grad
        dtype_A, dtype_B = ctx.dtypes
        grad = grad.contiguous()
        E = offs.shape[0]
        options = offs, ctx.float8_dtype, FP8_ONLY
        ones = scales_B.new_ones(E, 1, ctx.K)  # a GEMM of codes takes scales of both operands
        if scales_A is None:  # nobody asks for the maxima
            scales_A = scales_B.new_ones(grad.shape[0], 1)
        q, scales, amax = quantize_rowwise_factored(grad, offs, scales_B, scales_A, float8_dtype=ctx.float8_dtype)
        grad_A = grad_B_t = None
        if wants_A:
            grad_A = torch.ops.fp8tune.grouped_mm_input_gradient(
                grad, None, *options, q, scales, transposed_B, ones
            ).to(dtype_A)
        del q, transposed_B  # what the other gradient would have beside its own
        if wants_B:
            q, scales = quantize_colwise_factored(
                grad, offs, scales_A, amax, float8_dtype=ctx.float8_dtype, alignment=ALIGNMENT
            )
            grad_B = torch.ops.fp8tune.grouped_mm_weight_gradient(
                grad, None, *options, q, scales, transposed_A, ones.view(-1)
            ).to(dtype_B)
            grad_B_t = grad_B.transpose(1, 2)  # strides (K*N, 1, K), as B_t has them
        return grad_A, grad_B_t, *(None for _ in others)


_apply: Callable[..., Tensor] = _FoldedGroupedMM.apply
