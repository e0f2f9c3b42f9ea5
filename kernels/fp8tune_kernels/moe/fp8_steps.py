"""The steps of a layer in FP8, an operator each, with only the tensors that the step reads.

A tensor that no later step reads can therefore be freed between two steps, in eager mode and in a compiled graph.
Inside a step, kernels are launched one after the other, without a dispatcher. On a CPU, steps run the references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gemm import passes
from ..gemm.passes import Quantized, quantize_rows, quantize_stored, transpose_stored
from ..quantize import swiglu_rowwise, transposed_codes
from ..quantize.row_shifts import shifts_and_scales
from ..runtime.checks import fp8_dtype_for
from ..runtime.launching import replayed
from ..runtime.ops import on_its_device, step
from . import cast_transpose_3d, expert_sort, gather_sum, gathered_rows, gathered_transpose, shifted_transpose_3d

Maybe = Tensor | None
Dtype = torch.dtype | None


class Order(NamedTuple):
    """Order of rows: see :mod:`.expert_sort`."""

    offs: Tensor
    row_of: Tensor
    token_of_row: Tensor
    row_weights: Tensor


class Rows(NamedTuple):
    """Fields of :class:`Order` that most steps read: a replay looks at each tensor that a step gets."""

    offs: Tensor
    token_of_row: Tensor


class Weights(NamedTuple):
    """Weights (E, rows, columns) as a step gets them: what is None is made of what is there."""

    plain: Maybe = None
    codes: Maybe = None
    """FP8 values (E, columns, rows), a view."""
    scales: Maybe = None
    """One per row of each expert."""
    transposed: Maybe = None
    """FP8 values transposed in memory: (E, rows, columns), a view."""
    transposed_scales: Maybe = None
    """One per column, the same for a whole expert; None where the rows' scales are factors of a gradient."""


Given = Sequence[Maybe]
"""Fields of a named tuple, in their order: an operator gets a list."""


# Kernels


def quantized_both_ways(w: Tensor, one_scale: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return what ``quantize_stored`` does, then the transposed FP8 values and their scales, if they have any.

    Row-major weights are read once.
    """
    if w.is_contiguous():
        return cast_transpose_3d.SPEC(w, one_scale, dtype)
    q, scales = quantize_stored(w, dtype)
    if one_scale:
        return q, scales, *transposed_to_one_scale(q, scales)
    return q, scales, transpose_stored(q), scales.new_empty(0)


def transposed_to_one_scale(q: Tensor, scales: Tensor) -> Quantized:
    """Return FP8 values of ``quantize_stored``, transposed in memory, with one scale per expert."""
    return shifted_transpose_3d.SPEC(q, scales)


def sum_of_rows(rows: Tensor, row_of: Tensor, bias: Maybe = None, ids: Maybe = None, weights: Maybe = None) -> Tensor:
    """Return each token's sum of rows, with the biases of its experts."""
    if row_of.dim() == 1:  # each row is a token
        return rows
    inputs: tuple[Any, ...] = rows, row_of, None, None, None
    if bias is not None and weights is not None:
        inputs = rows, row_of, bias.to(torch.bfloat16).contiguous(), ids, weights.float()
    return gather_sum.SPEC(*inputs)[0]


def sorted_by_expert(ids: Tensor, weights: Tensor, experts: int) -> Order:
    """Return the order of rows.

    Ids of one dim are the end rows of experts whose rows lie in order already: each row is a token.
    """
    if ids.dim() == 1:
        rows = torch.arange(weights.shape[0], dtype=torch.int32, device=ids.device)
        return Order(ids.clone(), rows, rows.clone(), weights.to(torch.float32, copy=True))  # no output is an argument
    return Order(*expert_sort.SPEC(ids, weights, experts))


def _multiplied(rows: Quantized, q: Tensor, scales: Tensor, order: Order | Rows) -> Tensor:
    """Return the product of gathered rows of tokens and weights."""
    return gathered_rows.SPEC(rows[0], q.mT, order.offs, order.token_of_row, rows[1], scales)[0]


def _activated(
    y: Tensor, scales_y: Maybe, bias: Maybe, order: Order, gate: Sequence[str], keeps_y: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return FP8 values and scales of the activation, and of gate and up."""
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
    return swiglu_rowwise.SPEC(y, order.offs, scales_y, bias, order.row_weights, *gate, keeps_y, dtype)


def _columns_of_tokens(q: Tensor, order: Rows, shifts: Maybe) -> Tensor:
    """Return FP8 values of gathered rows as a product over rows takes them."""
    return gathered_transpose.SPEC(q, order.offs, order.token_of_row, shifts)[0]


# Steps


def _forward(
    x: Tensor,
    given_13: Given,
    given_2: Given,
    choice: Sequence[Tensor],
    biases: Given,
    gate: Sequence[str],
    keeps: Sequence[bool],
    float8_dtype: Dtype,
) -> list[Tensor]:
    """Return the output; the order of rows; FP8 values and scales of x, the activation, gate and up, new weights.

    ``choice``: ids and weights. ``keeps``: gate and up, transposed w13, transposed w2. Of new weights that it
    transposes it returns the transposed values, and scales of both.
    """
    (ids, weights), (b13, b2), dtype = choice, biases, fp8_dtype_for(x.device, float8_dtype)
    w13, w2, new = Weights(*given_13), Weights(*given_2), list[Tensor]()
    assert w13.plain is not None
    order = sorted_by_expert(ids, weights, w13.plain.shape[0])
    of_x = quantize_rows(x, dtype)
    q, scales = _new_weights(w13, keeps[1], False, dtype, new)
    y = _multiplied(of_x, q, scales, order)
    del q
    activated = _activated(y, None, b13, order, gate, keeps[0], dtype)
    del y
    of_w2 = _new_weights(w2, keeps[2], True, dtype, new)
    rows = passes.multiply((activated[0], activated[1]), of_w2, order.offs)
    return [sum_of_rows(rows, order.row_of, b2, ids, weights), *order, *of_x, *activated, *new]


def _new_weights(w: Weights, transposes: bool, one_scale: bool, dtype: torch.dtype, new: list[Tensor]) -> Quantized:
    """Return FP8 values and scales of weights; add to ``new`` what the layer keeps of those that it makes."""
    if w.codes is not None or not transposes:
        of_w = _codes(w, dtype)
        new += of_w if w.codes is None else ()
        return of_w
    assert w.plain is not None
    q, scales, *both = quantized_both_ways(w.plain, one_scale, dtype)
    new += both[0], scales, *(both[1:] if one_scale else ())
    return q, scales


def _activate_again(
    scales_13: Tensor,
    order_: Sequence[Tensor],
    of_y: Given,
    of_x: Given,
    given_13: Given,
    b13: Maybe,
    gate: Sequence[str],
    float8_dtype: Dtype,
) -> list[Tensor]:
    """Return FP8 values and scales of the activation; without those of gate and up, also gate and up in bfloat16."""
    order, w13 = Order(*order_), Weights(*given_13)
    dtype = fp8_dtype_for(order.offs.device, float8_dtype)
    if of_y[0] is not None:
        return list(_activated(of_y[0], of_y[1], None, order, gate, False, dtype)[:2])
    q_x, scales_x = of_x
    assert q_x is not None
    assert scales_x is not None
    y = _multiplied((q_x, scales_x), _codes(w13, dtype)[0], scales_13, order)
    return [*_activated(y, None, b13, order, gate, False, dtype)[:2], y]


def _codes(w: Weights, dtype: torch.dtype) -> Quantized:
    if w.codes is not None and w.scales is not None:
        return w.codes, w.scales
    assert w.plain is not None
    return quantize_stored(w.plain, dtype)


def _down_gradient(
    grad: Tensor, rows: Sequence[Tensor], given_2: Given, wants_h: bool, float8_dtype: Dtype
) -> list[Tensor]:
    """Return FP8 values and scales of the output's gradient, by token, and the gradient of the activation, by row."""
    order, w2, dtype = Rows(*rows), Weights(*given_2), fp8_dtype_for(grad.device, float8_dtype)
    of_grad = quantize_rows(grad, dtype)
    if not wants_h:
        return [*of_grad]
    transposed, scales = w2.transposed, w2.transposed_scales
    if transposed is None or scales is None:
        transposed, scales = transposed_to_one_scale(*_codes(w2, dtype))
    return [*of_grad, _multiplied(of_grad, transposed, scales, order)]


def _down_weight_gradient(
    q: Tensor,
    scales: Tensor,
    q_h: Tensor,
    scales_h: Tensor,
    rows_: Sequence[Tensor],
    is_transposed: bool,
    buffer: Maybe = None,
) -> Tensor:
    """Return the gradient of w2, (E, K, N) or (E, N, K), from the output's by token and the activation by row."""
    order, sizes = Rows(*rows_), (q.shape[1], q_h.shape[1])
    shifts, of_columns, ones = shifts_and_scales(scales_h, scales, order.offs, None, *sizes, order.token_of_row)
    grad = _columns_of_tokens(q, order, shifts), of_columns
    rows = transposed_codes.SPEC(q_h, order.offs, None)[0], ones
    return _contracted(grad, rows, order, is_transposed, buffer)


def _contracted(grad: Quantized, rows: Quantized, order: Rows, is_transposed: bool, buffer: Maybe) -> Tensor:
    """Return the product over the rows of each expert, (E, N, K) or (E, K, N); with a buffer, added to it."""
    pair = (rows, grad) if is_transposed else (grad, rows)
    return passes.contract(*pair, order.offs, order.token_of_row.shape[0], buffer)


def _input_gradient(q: Tensor, scales: Tensor, places: Sequence[Tensor], given_13: Given) -> Tensor:
    """Return the gradient of x, (T, K), from that of gate and up, which is cast over the scales of w13.

    ``places``: ``offs`` and ``row_of``.
    """
    (offs, row_of), w13 = places, Weights(*given_13)
    transposed = transpose_stored(_codes(w13, q.dtype)[0]) if w13.transposed is None else w13.transposed
    E, _, K = transposed.shape
    rows = passes.multiply((q, scales), (transposed, scales.new_ones(E, 1, K)), offs)
    return sum_of_rows(rows, row_of)


def _gate_up_weight_gradient(
    q: Tensor,
    scales: Tensor,
    scales_13: Tensor,
    q_x: Tensor,
    scales_x: Tensor,
    rows_: Sequence[Tensor],
    is_transposed: bool,
    buffer: Maybe = None,
) -> Tensor:
    """Return the gradient of w13, (E, 2N, K) or (E, K, 2N), from that of gate and up by row and x by token."""
    order, sizes = Rows(*rows_), (q.shape[1], q_x.shape[1])
    shifts, of_columns, ones = shifts_and_scales(scales, scales_x, order.offs, scales_13, *sizes, order.token_of_row)
    grad = transposed_codes.SPEC(q, order.offs, shifts)[0], of_columns
    rows = _columns_of_tokens(q_x, order, None), ones
    return _contracted(grad, rows, order, is_transposed, buffer)


# Operators


def _weight_gradient(name: str, run: Callable[..., Tensor]) -> Callable[..., Maybe]:
    """Return a step that returns a gradient as the weights lie; or adds it to a buffer, and returns None.

    The latter is no operator, because it changes its last argument, and so has no part in a graph.
    """
    operator, on_gpu = step(name, run), on_its_device(replayed(run))

    def call(*arguments: Any, buffer: Maybe = None) -> Maybe:
        is_transposed = arguments[-1]
        if buffer is None:
            gradient = operator(*arguments)
            return gradient.mT if is_transposed else gradient
        with torch.no_grad():
            (on_gpu if buffer.is_cuda else run)(*arguments, buffer.mT if is_transposed else buffer)
        return None

    return call


forward = step("moe_forward", _forward)
activate_again = step("moe_activate_again", _activate_again)
down_gradient = step("moe_down_gradient", _down_gradient)
down_weight_gradient = _weight_gradient("moe_down_weight_gradient", _down_weight_gradient)
input_gradient = step("moe_input_gradient", _input_gradient)
gate_up_weight_gradient = _weight_gradient("moe_gate_up_weight_gradient", _gate_up_weight_gradient)
