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
group and column. A value that is small in its row, such as in a channel beside outliers, has fewer bits there. And the
casts take no row's largest value for less than 1e-12: of gradients divided by w, that is one of about 1e-13 undivided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..quantize import colwise_3d, rowwise_2d, rowwise_factored, transposed_codes, transposed_codes_3d
from ..quantize.row_shifts import shifts_and_scales
from ..runtime.checks import check_ends, fp8_dtype_for
from ..runtime.once import differentiable_once
from ..runtime.ops import define, run
from ..spec import bucket
from . import passes

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
    """Two operators. Saves codes of rows and scales; of the weights, where there are such, the transposed codes."""

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
        q_B = transposed_B = None
        if len(codes_B):  # a compiler knows no truth of a tuple of tensors
            out, q_A, scales_A = _forward(A, B_t, offs, float8_dtype, *codes_B[:2])
            _, scales_B, transposed_B = codes_B
        else:
            out, q_A, scales_A, q_B, scales_B = _forward(A, B_t, offs, float8_dtype, None, None)
        of_A = (q_A, scales_A) if wants_B else (None, None)
        of_B = (q_B, transposed_B) if wants_A else (None, None)
        ctx.save_for_backward(*of_A, *of_B, scales_B, offs)
        ctx.float8_dtype, ctx.dtypes = float8_dtype, (A.dtype, B_t.dtype)
        return out

    @staticmethod
    @differentiable_once("fp8_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wants_A, wants_B, *others = ctx.needs_input_grad
        dtype_A, dtype_B = ctx.dtypes
        found = _backward(grad.contiguous(), *ctx.saved_tensors, ctx.float8_dtype, wants_A, wants_B)
        grad_A = found[0].to(dtype_A) if wants_A else None
        # strides (K*N, 1, K), as B_t has them
        grad_B_t = found[-1].to(dtype_B).transpose(1, 2) if wants_B else None
        return grad_A, grad_B_t, *(None for _ in others)


_apply: Callable[..., Tensor] = _FoldedGroupedMM.apply


def _run_forward(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    q_B: Tensor | None,
    scales_B: Tensor | None,
) -> list[Tensor]:
    """The output, codes and scales of A and, unless they are given, of B_t."""
    (M, K), (E, _, N), device = A.shape, B_t.shape, A.device
    float8_dtype = fp8_dtype_for(device, float8_dtype)
    q_A, scales_A = run(rowwise_2d.SPEC, (bucket(M), K), (A, float8_dtype, True))
    made: tuple[Tensor, ...] = ()
    if q_B is None or scales_B is None:
        made = q_B, scales_B = run(colwise_3d.SPEC, (E, K, N), (B_t, float8_dtype, True))
    out = passes.multiply((q_A, scales_A), (q_B, scales_B), offs)
    return [out, q_A, scales_A, *made]


def _run_backward(
    grad: Tensor,
    q_A: Tensor | None,
    scales_A: Tensor | None,
    q_B: Tensor | None,
    transposed_B: Tensor | None,
    scales_B: Tensor,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    wants_A: bool,
    wants_B: bool,
) -> list[Tensor]:
    """The gradients that are wanted: of A, (M, K), and of the weights, (E, N, K)."""
    (M, N), E, K, device = grad.shape, offs.shape[0], _columns(q_A, q_B, transposed_B), grad.device
    float8_dtype = fp8_dtype_for(device, float8_dtype)
    q, scales = run(rowwise_factored.SPEC, (bucket(M), N, E), (grad, offs, scales_B, float8_dtype, True))
    found = []
    if wants_B:
        assert q_A is not None
        assert scales_A is not None
        shifts, of_grad, ones = shifts_and_scales(scales, scales_A, offs, scales_B, N, K)
    else:
        ones = torch.ones(E * K, device=device)  # a GEMM of codes takes scales of both operands
    if wants_A:
        if transposed_B is None:
            (transposed_B,) = run(transposed_codes_3d.SPEC, (E, K, N), (q_B,))
        codes = transposed_B, ones.view(E, 1, K)
        found.append(passes.multiply((q, scales), codes, offs))
        del codes, transposed_B  # what the other gradient would have beside its own
    if wants_B:
        (shifted,) = run(transposed_codes.SPEC, (bucket(M), N, E), (q, offs, shifts))
        (transposed_A,) = run(transposed_codes.SPEC, (bucket(M), K, E), (q_A, offs, None))
        found.append(passes.contract((shifted, of_grad), (transposed_A, ones), offs, M))
    return found


def _columns(q_A: Tensor | None, q_B: Tensor | None, transposed_B: Tensor | None) -> int:
    """K, of what is there."""
    if q_A is not None:
        return q_A.shape[1]
    if q_B is not None:
        return q_B.shape[1]
    assert transposed_B is not None
    return transposed_B.shape[2]


def _forward_on_cpu(A: Tensor, B_t: Tensor, offs: Tensor, *rest: Any) -> list[Tensor]:
    check_ends(offs, A.shape[0])
    with torch.no_grad():  # autograd would follow the references, and stumbles over their views
        return _run_forward(A, B_t, offs, *rest)


def _backward_on_cpu(*given: Any) -> list[Tensor]:
    with torch.no_grad():
        return _run_backward(*given)


def _fake_forward(
    A: Tensor, B_t: Tensor, offs: Tensor, float8_dtype: torch.dtype | None, q_B: Tensor | None, *rest: Any
) -> list[Tensor]:
    float8_dtype = fp8_dtype_for(A.device, float8_dtype)
    made = colwise_3d.SPEC.outputs(B_t, float8_dtype, True) if q_B is None else ()
    out = A.new_empty(A.shape[0], B_t.shape[2], dtype=torch.bfloat16)
    return [out, *rowwise_2d.SPEC.outputs(A, float8_dtype, True), *made]


def _fake_backward(
    grad: Tensor,
    q_A: Tensor | None,
    scales_A: Tensor | None,
    q_B: Tensor | None,
    transposed_B: Tensor | None,
    scales_B: Tensor,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    wants_A: bool,
    wants_B: bool,
) -> list[Tensor]:
    (M, N), K = grad.shape, _columns(q_A, q_B, transposed_B)
    shapes = [(M, K)] * wants_A + [(offs.shape[0], N, K)] * wants_B
    return [grad.new_empty(shape, dtype=torch.bfloat16) for shape in shapes]


_forward: Callable[..., list[Tensor]] = define(
    "folded_grouped_mm_forward(Tensor A, Tensor B_t, Tensor offs, ScalarType? float8_dtype, Tensor? q_B, "
    "Tensor? scales_B) -> Tensor[]",
    _run_forward,
    _forward_on_cpu,
    _fake_forward,
    makes_codes=True,
)
_backward: Callable[..., list[Tensor]] = define(
    "folded_grouped_mm_backward(Tensor grad, Tensor? q_A, Tensor? scales_A, Tensor? q_B, Tensor? transposed_B, "
    "Tensor scales_B, Tensor offs, ScalarType? float8_dtype, bool wants_A, bool wants_B) -> Tensor[]",
    _run_backward,
    _backward_on_cpu,
    _fake_backward,
    makes_codes=True,
)
