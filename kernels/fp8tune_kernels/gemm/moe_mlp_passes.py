"""Both passes of :mod:`.moe_mlp`, an operator each: kernels are launched one after the other, through no dispatcher.

An operator that launches several kernels spares the host a call of the dispatcher, the checks and the lookup for each.
On a CPU the passes are made of the references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..quantize import (
    colwise_3d,
    gated_rows,
    rowwise_2d,
    rowwise_factored,
    swiglu_gradient,
    swiglu_rowwise,
    transposed_codes,
    transposed_codes_3d,
)
from ..quantize.row_shifts import shifts_and_scales
from ..runtime.checks import check_ends, fp8_dtype_for
from ..runtime.ops import define, run
from ..spec import bucket
from . import passes
from .expert_bias import rows_of_experts

__all__ = ["RECOMPUTE", "mlp_backward", "mlp_forward"]

RECOMPUTE = ("none", "h", "gate-up")
"""What is not held between the passes: see :mod:`.moe_mlp`."""

Codes = tuple[Tensor, Tensor]
"""Codes and scales."""


def _run_forward(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    row_weights: Tensor | None,
    q_13: Tensor | None,
    scales_13: Tensor | None,
    q_2: Tensor | None,
    scales_2: Tensor | None,
    activation: str,
    layout: str,
    keeps_y: bool,
    float8_dtype: torch.dtype | None,
) -> list[Tensor]:
    """The output; codes and scales of x, of h and of y, empty unless it keeps them; and of weights not given so."""
    dtype = fp8_dtype_for(x.device, float8_dtype)
    made = []
    q_x, scales_x = run(rowwise_2d.SPEC, (bucket(len(x)), x.shape[1]), (x, dtype, True))
    if q_13 is None or scales_13 is None:
        q_13, scales_13 = _quantized(w13, dtype)
        made += [q_13, scales_13]
    if q_2 is None or scales_2 is None:
        q_2, scales_2 = _quantized(w2, dtype)
        made += [q_2, scales_2]
    y = passes.multiply((q_x, scales_x), (q_13, scales_13), offs)
    bias, weights = _as(b13, torch.bfloat16), _as(row_weights, torch.float32)
    q_h, scales_h, q_y, scales_y = _activate(y, offs, None, bias, weights, activation, layout, keeps_y, dtype)
    del y
    out = passes.multiply((q_h, scales_h), (q_2, scales_2), offs)
    if b2 is not None:
        out = torch.addmm(out, _weighted_rows(offs, len(x), row_weights), b2.to(torch.bfloat16))
    return [out, q_x, scales_x, q_h, scales_h, q_y, scales_y, *made]


def _run_backward(
    grad: Tensor,
    offs: Tensor,
    q_x: Tensor | None,
    scales_x: Tensor,
    q_y: Tensor | None,
    scales_y: Tensor | None,
    q_h: Tensor | None,
    scales_h: Tensor,
    q_13: Tensor | None,
    scales_13: Tensor,
    transposed_13: Tensor | None,
    q_2: Tensor | None,
    scales_2: Tensor,
    transposed_2: Tensor | None,
    w13: Tensor | None,
    w2: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    row_weights: Tensor | None,
    activation: str,
    layout: str,
    recompute: str,
    wanted: list[bool],
    float8_dtype: torch.dtype | None,
) -> list[Tensor]:
    """The gradients that are wanted, of x, w13, w2, b13, b2 and row_weights; in bfloat16 of the first three."""
    wants_x, wants_13, wants_2, wants_b13, wants_b2, wants_weights = wanted
    wants_y = wants_x or wants_13 or wants_b13 or wants_weights
    dtype, E, (M, K) = fp8_dtype_for(grad.device, float8_dtype), offs.shape[0], grad.shape
    grads: dict[str, Tensor] = {}
    if b2 is not None and wants_b2:
        grads["b2"] = _weighted_rows(offs, M, row_weights).t() @ grad
    if b2 is not None and wants_weights:
        grads["row_weights"] = _gradient_through_bias(grad, b2, offs)
    if not (wants_y or wants_2):
        return _in_order(grads)
    if w13 is not None:
        q_13, _ = _quantized(w13, dtype)
    y, bias, weights = q_y, None, _as(row_weights, torch.float32)
    if recompute == "gate-up":
        assert q_x is not None
        assert q_13 is not None
        y, bias = passes.multiply((q_x, scales_x), (q_13, scales_13), offs), _as(b13, torch.bfloat16)
    if wants_2 and q_h is None:
        q_h, scales_h, _, _ = _activate(y, offs, scales_y, bias, weights, activation, layout, False, dtype)
    q, scales = run(rowwise_factored.SPEC, (bucket(M), K, E), (grad, offs, scales_2, dtype, True))
    if wants_y:
        ones = torch.ones(max(E * K, scales_13.numel()), device=grad.device)  # a GEMM of codes takes scales of both
        if transposed_2 is None:
            transposed_2 = _transposed(q_2 if w2 is None else _quantized(w2, dtype)[0])
        dh = _input_gradient((q, scales), transposed_2, ones, offs)
        del q_2, transposed_2
    if wants_2:
        assert q_h is not None
        grads["w2"] = _weight_gradient((q, scales), scales_2, (q_h, scales_h), offs)
    del q_h
    if not wants_y:
        return _in_order(grads)
    assert y is not None
    inputs = y, dh, offs, scales_13, scales_y, bias, weights, activation, layout, wants_b13, dtype
    q, scales, d_weights, d_bias = run(swiglu_gradient.SPEC, gated_rows.key(y, offs), inputs)
    del dh, y, q_y, inputs
    if wants_x:
        if transposed_13 is None:
            transposed_13 = _transposed(q_13)
        grads["x"] = _input_gradient((q, scales), transposed_13, ones, offs)
        del transposed_13
    if wants_13:
        assert q_x is not None
        grads["w13"] = _weight_gradient((q, scales), scales_13, (q_x, scales_x), offs)
    if wants_b13:
        grads["b13"] = d_bias
    if wants_weights:
        grads["row_weights"] = d_weights if b2 is None else d_weights + grads["row_weights"]
    return _in_order(grads)


def _in_order(grads: dict[str, Tensor]) -> list[Tensor]:
    return [grads[name] for name in ("x", "w13", "w2", "b13", "b2", "row_weights") if name in grads]


# The kernels


def _as(given: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if given is None else given.to(dtype).contiguous()


def _quantized(w: Tensor, dtype: torch.dtype) -> Codes:
    """Codes and scales of weights (E, rows, columns), a scale a row."""
    B_t = w.transpose(1, 2)
    q, scales = run(colwise_3d.SPEC, tuple(B_t.shape), (B_t, dtype, True))
    return q, scales


def _transposed(codes: Tensor | None) -> Tensor:
    assert codes is not None
    (transposed,) = run(transposed_codes_3d.SPEC, tuple(codes.shape), (codes,))
    return transposed


def _activate(
    y: Tensor | None,
    offs: Tensor,
    scales_y: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    layout: str,
    keep: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """What ``swiglu-rowwise`` makes of gate and up, in bfloat16 or codes."""
    assert y is not None
    inputs = y, offs, scales_y, bias, weights, activation, layout, keep, dtype
    return run(swiglu_rowwise.SPEC, gated_rows.key(y, offs), inputs)


def _input_gradient(rows: Codes, transposed: Tensor, ones: Tensor, offs: Tensor) -> Tensor:
    """Rows of a gradient times the weights of their experts, whose scales are factors of the rows' cast."""
    E, _, K = transposed.shape
    return passes.multiply(rows, (transposed, ones[: E * K].view(E, 1, K)), offs)


def _weight_gradient(grad: Codes, factors: Tensor, rows: Codes, offs: Tensor) -> Tensor:
    """Of codes of the gradient's rows, cast over ``factors``, and of the rows that were multiplied."""
    (M, N), K, E = grad[0].shape, rows[0].shape[1], offs.shape[0]
    shifts, scales, ones = shifts_and_scales(grad[1], rows[1], offs, factors, N, K)
    (shifted,) = run(transposed_codes.SPEC, (bucket(M), N, E), (grad[0], offs, shifts))
    (transposed,) = run(transposed_codes.SPEC, (bucket(M), K, E), (rows[0], offs, None))
    return passes.contract((shifted, scales), (transposed, ones), offs, M)


# The bias of the GEMM down


def _weighted_rows(offs: Tensor, rows: int, row_weights: Tensor | None) -> Tensor:
    """(M, E), bfloat16: 1, or a row's weight, where a row is of a group. A GEMM with it adds what groups share."""
    found = rows_of_experts(rows, offs, torch.bfloat16)
    return found if row_weights is None else found * row_weights[:, None].to(torch.bfloat16)


def _gradient_through_bias(grad: Tensor, b2: Tensor, offs: Tensor) -> Tensor:
    """(M,), float32: what the bias adds to the gradient of the rows' weights."""
    rows = torch.arange(len(grad), device=offs.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, rows, right=True)[:, None]  # E for a row of none
    found = (grad @ b2.to(torch.bfloat16).t()).float().gather(1, group.clamp(max=len(offs) - 1))
    return found.masked_fill(group == len(offs), 0).squeeze(1)


# The operators


def _forward_on_cpu(x: Tensor, w13: Tensor, w2: Tensor, offs: Tensor, *rest: Any) -> list[Tensor]:
    check_ends(offs, x.shape[0])
    with torch.no_grad():  # autograd would follow the references, and stumbles over their views
        return _run_forward(x, w13, w2, offs, *rest)


def _backward_on_cpu(*given: Any) -> list[Tensor]:
    with torch.no_grad():
        return _run_backward(*given)


def _fake_forward(x: Tensor, w13: Tensor, w2: Tensor, offs: Tensor, *rest: Any) -> list[Tensor]:
    _, _, _, q_13, _, q_2, _, activation, layout, keeps_y, float8_dtype = rest
    dtype, (M, K) = fp8_dtype_for(x.device, float8_dtype), x.shape
    y = x.new_empty(M, w13.shape[1], dtype=torch.bfloat16)
    given = ((w13, q_13), (w2, q_2))
    made = [colwise_3d.outputs(w.transpose(1, 2), dtype, True) for w, codes in given if codes is None]
    return [
        x.new_empty(M, K, dtype=torch.bfloat16),
        *rowwise_2d.outputs(x, dtype, True),
        *swiglu_rowwise.outputs(y, offs, None, None, None, activation, layout, keeps_y, dtype),
        *(each for codes in made for each in codes),
    ]


def _fake_backward(grad: Tensor, offs: Tensor, *rest: Any) -> list[Tensor]:
    scales_13, wanted = rest[7], rest[-2]
    (M, K), E = grad.shape, offs.shape[0]
    N = scales_13.numel() // E // 2
    shapes = ((M, K), (E, 2 * N, K), (E, K, N), (E, 2 * N), (E, K), (M,))
    dtypes = (*[torch.bfloat16] * 3, torch.float32, torch.bfloat16, torch.float32)
    return [
        grad.new_empty(shape, dtype=dtype) for shape, dtype, wants in zip(shapes, dtypes, wanted, strict=True) if wants
    ]


mlp_forward: Callable[..., list[Tensor]] = define(
    "moe_mlp_forward(Tensor x, Tensor w13, Tensor w2, Tensor offs, Tensor? b13, Tensor? b2, Tensor? row_weights, "
    "Tensor? q_13, Tensor? scales_13, Tensor? q_2, Tensor? scales_2, str activation, str layout, bool keeps_y, "
    "ScalarType? float8_dtype) -> Tensor[]",
    _run_forward,
    _forward_on_cpu,
    _fake_forward,
    makes_codes=True,
)
mlp_backward: Callable[..., list[Tensor]] = define(
    "moe_mlp_backward(Tensor grad, Tensor offs, Tensor? q_x, Tensor scales_x, Tensor? q_y, Tensor? scales_y, "
    "Tensor? q_h, Tensor scales_h, Tensor? q_13, Tensor scales_13, Tensor? transposed_13, Tensor? q_2, "
    "Tensor scales_2, Tensor? transposed_2, Tensor? w13, Tensor? w2, Tensor? b13, Tensor? b2, Tensor? row_weights, "
    "str activation, str layout, str recompute, bool[] wanted, ScalarType? float8_dtype) -> Tensor[]",
    _run_backward,
    _backward_on_cpu,
    _fake_backward,
    makes_codes=True,
)
