"""The steps of a layer in bfloat16, an operator each. Rows are copied for torch's grouped GEMM; nothing is cast."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..gemm import passes
from ..runtime.ops import step
from .fp8_steps import Given, Maybe, Order, sorted_by_expert, sum_of_rows
from .gated_bf16 import activate, activation_gradient


def _gate_up(x: Tensor, w13: Tensor, b13: Maybe, offs: Tensor, token_of_row: Tensor) -> Tensor:
    """Return gate and up, (M, 2N)."""
    y = passes.multiply_bf16(x.index_select(0, token_of_row), w13.mT, offs)
    return y if b13 is None else passes.add_bias(y, b13, offs)


def _forward(
    x: Tensor, w13: Tensor, w2: Tensor, choice: Sequence[Tensor], biases: Given, gate: Sequence[str]
) -> list[Tensor]:
    """Return the output; the order of rows; gate and up. ``choice``: ids and weights."""
    (ids, weights), (b13, b2) = choice, biases
    order = sorted_by_expert(ids, weights, w13.shape[0])
    y = _gate_up(x, w13, b13, order.offs, order.token_of_row)
    h = activate(y, order.row_weights, order.offs, *gate)
    rows = passes.multiply_bf16(h, w2.mT, order.offs)
    del h
    return [sum_of_rows(rows, order.row_of, b2, ids, weights), *order, y]


def _activation_gradients(
    grad: Tensor, y: Tensor, w2: Tensor, order_: Sequence[Tensor], gate: Sequence[str], wants_2: bool
) -> list[Tensor]:
    """Return the gradients of gate and up, of the rows' weights and, if wanted, of w2."""
    order = Order(*order_)
    grad_rows = grad.index_select(0, order.token_of_row)
    dh = passes.multiply_bf16(grad_rows, w2, order.offs)
    dy, h, d_weights = activation_gradient(y, dh, order.row_weights, order.offs, *gate)
    del dh
    return [dy, d_weights, *([passes.contract_bf16(grad_rows, h, order.offs)] if wants_2 else [])]


def _token_gradients(dy: Tensor, x: Maybe, w13: Maybe, order_: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of x, if w13 is given, and that of w13, if x is given."""
    order, result = Order(*order_), list[Tensor]()
    if w13 is not None:
        result.append(sum_of_rows(passes.multiply_bf16(dy, w13, order.offs), order.row_of))
    if x is not None:
        result.append(passes.contract_bf16(dy, x.index_select(0, order.token_of_row), order.offs))
    return result


gate_up = step("moe_bf16_gate_up", _gate_up)
forward = step("moe_bf16_forward", _forward)
activation_gradients = step("moe_bf16_activation_gradients", _activation_gradients)
token_gradients = step("moe_bf16_token_gradients", _token_gradients)
