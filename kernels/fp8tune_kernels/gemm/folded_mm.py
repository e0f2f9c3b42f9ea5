"""The folded recipe of ``fp8_grouped_mm``: A, the weights and the gradient are cast once; other codes are transposes.

Each is cast along its rows, with a scale a row: A = Aq / s, B[e] = Bq[e] / w[e], a w an output column, and the gradient
once w is folded into it: grad = Gq / r * w. All scales are powers of two. So

    out    = A @ B_t          = (Aq @ Bq_t) / s / w                      as by default, to the same bytes
    grad_A = grad @ B         = (Gq @ Bq) / r                            Bq: the codes of B_t, transposed
    grad_B = grad.t() @ A     = w * sum over rows of Gq.t() Aq / (r s)
                              = w / least * (Gq * shift).t() @ Aq        shift = least / (r s): quantize/row_shifts.py

The last operands are transposed codes; those of Gq with rows shifted to one scale a group. A shift changes the exponent
of a code and nothing else, until it becomes subnormal: in rows that weigh 2**-15 of the heaviest and less.

Bytes that move for an element of bfloat16, and what is held between the passes:

            by default                      folded                                       held by default, folded
    A       3 rowwise-2d + 3 colwise        3 rowwise-2d + 2 transposed-codes            2, 1
    grad    3 rowwise-2d + 3 colwise        3 rowwise-factored + 2 transposed-codes      0, 0
    B_t     3 colwise-3d + 3 transpose-3d   3 colwise-3d + 2 transposed-codes-3d         0 as it is the parameter, 1

``colwise`` and ``transpose-3d`` read their input twice, the second time from L2 if it still has it. Nothing here has
maxima of columns, and all reads its input once.

Folding scales is published (inclusionAI/linghe). What it costs: grad_B has a scale a row where the default has one a
group and column. A value that is small in its row, such as in a channel beside outliers, has fewer bits there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8tune_kernels.gemm.methods import FP8_ONLY
from fp8tune_kernels.quantize.colwise_3d import quantize_colwise_3d
from fp8tune_kernels.quantize.row_shifts import shifts_of_rows
from fp8tune_kernels.quantize.rowwise_2d import quantize_rowwise_2d
from fp8tune_kernels.quantize.rowwise_factored import quantize_rowwise_factored
from fp8tune_kernels.quantize.transposed_codes import transpose_codes
from fp8tune_kernels.quantize.transposed_codes_3d import transpose_codes_3d
from fp8tune_kernels.runtime.once import differentiable_once

__all__ = ["folded_grouped_mm"]


def folded_grouped_mm(
    A: Tensor, B_t: Tensor, offs: Tensor, float8_dtype: torch.dtype | None, *codes_B: Tensor
) -> Tensor:
    """``fp8_grouped_mm(recipe="folded")`` of operands that were checked.

    ``codes_B``: codes of B_t, their scales, and the codes transposed, where it was cast before.
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
        q_A = scales_A = transposed_B = None
        if wants_B:
            q_A, scales_A = quantize_rowwise_2d(A, float8_dtype=float8_dtype)
        if len(codes_B):  # a compiler knows no truth of a tuple of tensors
            q_B, scales_B, transposed_B = codes_B
        else:
            q_B, scales_B = quantize_colwise_3d(B_t, float8_dtype=float8_dtype)
        held_B = (q_B if transposed_B is None else None) if wants_A else None
        ctx.save_for_backward(q_A, scales_A, held_B, transposed_B if wants_A else None, scales_B, offs)
        ctx.float8_dtype, ctx.dtypes = float8_dtype, (A.dtype, B_t.dtype)
        out: Tensor = torch.ops.fp8tune.grouped_mm_forward(
            A, B_t, offs, float8_dtype, FP8_ONLY, q_A, scales_A, q_B, scales_B
        )
        return out

    @staticmethod
    @differentiable_once("fp8_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_A, scales_A, q_B, transposed_B, scales_B, offs = ctx.saved_tensors
        wants_A, wants_B, *others = ctx.needs_input_grad
        dtype_A, dtype_B = ctx.dtypes
        options = offs, ctx.float8_dtype, FP8_ONLY
        grad = grad.contiguous()
        q, scales = quantize_rowwise_factored(grad, offs, scales_B, float8_dtype=ctx.float8_dtype)
        grad_A = grad_B_t = None
        if wants_A:
            if transposed_B is None:
                transposed_B = transpose_codes_3d(q_B)
            ones = scales_B.new_ones(offs.shape[0], 1, transposed_B.shape[2])  # a GEMM takes scales of both operands
            grad_A = torch.ops.fp8tune.grouped_mm_input_gradient(
                grad, None, *options, q, scales, transposed_B, ones
            ).to(dtype_A)
        del q_B, transposed_B  # what the other gradient would have beside its own
        if wants_B:
            shifts, least = shifts_of_rows(scales, scales_A, offs)
            shifted, transposed_A = transpose_codes(q, offs, shifts), transpose_codes(q_A, offs)
            of_grad = (least[:, None] / scales_B.view(offs.shape[0], -1)).view(-1)
            ones = least.new_ones(offs.shape[0] * q_A.shape[1])
            grad_B = torch.ops.fp8tune.grouped_mm_weight_gradient(
                grad, None, *options, shifted, of_grad, transposed_A, ones
            ).to(dtype_B)
            grad_B_t = grad_B.transpose(1, 2)  # strides (K*N, 1, K), as B_t has them
        return grad_A, grad_B_t, *(None for _ in others)


_apply: Callable[..., Tensor] = _FoldedGroupedMM.apply
