"""The steps of a layer in bfloat16, an operator each. Rows are copied for torch's grouped GEMM; nothing is cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gemm import passes
from ..gemm.expert_bias import add_bias
from . import expert_sort
from .fp8_steps import sorted_by_expert, step, sum_of_rows
from .gated_bf16 import activate, activation_gradient

__all__ = ["activation_gradients", "forward", "gate_up", "token_gradients"]


def _gate_up(x: Tensor, w13: Tensor, b13: Tensor | None, offs: Tensor, token_of_row: Tensor) -> Tensor:
    """Return gate and up, (M, 2N)."""
    y = passes.multiply_bf16(x.index_select(0, token_of_row), w13.mT, offs)
    return y if b13 is None else add_bias(y, b13, offs)


def _fake_gate_up(x: Tensor, w13: Tensor, b13: Tensor | None, offs: Tensor, token_of_row: Tensor) -> Tensor:
    return x.new_empty(token_of_row.shape[0], w13.shape[1])


def _forward(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
    layout: str,
) -> list[Tensor]:
    """Return the output; the order of rows; gate and up."""
    offs, row_of, token_of_row, row_weights = sorted_by_expert(ids, weights, w13.shape[0])
    y = _gate_up(x, w13, b13, offs, token_of_row)
    h = activate(y, row_weights, offs, activation, layout)
    rows = passes.multiply_bf16(h, w2.mT, offs)
    del h
    return [sum_of_rows(rows, row_of, b2, ids, weights), offs, row_of, token_of_row, row_weights, y]


def _fake_forward(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> list[Tensor]:
    order = expert_sort.outputs(ids, weights, w13.shape[0])
    return [torch.empty_like(x), *order, x.new_empty(order[2].shape[0], w13.shape[1])]


def _activation_gradients(
    grad: Tensor,
    y: Tensor,
    w2: Tensor,
    offs: Tensor,
    token_of_row: Tensor,
    row_weights: Tensor,
    activation: str,
    layout: str,
    wants_2: bool,
) -> list[Tensor]:
    """Return the gradients of gate and up, of the rows' weights and, if wanted, of w2."""
    grad_rows = grad.index_select(0, token_of_row)
    dh = passes.multiply_bf16(grad_rows, w2, offs)
    dy, h, d_weights = activation_gradient(y, dh, row_weights, offs, activation, layout)
    del dh
    return [dy, d_weights, *([passes.contract_bf16(grad_rows, h, offs)] if wants_2 else [])]


def _fake_activation_gradients(
    grad: Tensor, y: Tensor, w2: Tensor, offs: Tensor, token_of_row: Tensor, row_weights: Tensor, *rest: Any
) -> list[Tensor]:
    d_w2 = [w2.new_empty(w2.shape)] if rest[-1] else []
    return [torch.empty_like(y), torch.empty_like(row_weights), *d_w2]


def _token_gradients(
    dy: Tensor,
    x: Tensor | None,
    w13: Tensor | None,
    offs: Tensor,
    row_of: Tensor,
    token_of_row: Tensor,
) -> list[Tensor]:
    """Return the gradient of x, if w13 is given, and that of w13, if x is given."""
    result = []
    if w13 is not None:
        result.append(sum_of_rows(passes.multiply_bf16(dy, w13, offs), row_of))
    if x is not None:
        rows = x.index_select(0, token_of_row)
        result.append(passes.contract_bf16(dy, rows, offs))
    return result


def _fake_token_gradients(
    dy: Tensor, x: Tensor | None, w13: Tensor | None, offs: Tensor, row_of: Tensor, token_of_row: Tensor
) -> list[Tensor]:
    result = []
    if w13 is not None:
        result.append(dy.new_empty(row_of.shape[0], w13.shape[2]))
    if x is not None:
        result.append(dy.new_empty(offs.shape[0], dy.shape[1], x.shape[1]))
    return result


gate_up: Callable[..., Tensor] = step(
    "moe_bf16_gate_up(Tensor x, Tensor w13, Tensor? b13, Tensor offs, Tensor token_of_row) -> Tensor",
    _gate_up,
    _fake_gate_up,
)
forward: Callable[..., list[Tensor]] = step(
    "moe_bf16_forward(Tensor x, Tensor w13, Tensor w2, Tensor ids, Tensor weights, Tensor? b13, Tensor? b2, "
    "str activation, str layout) -> Tensor[]",
    _forward,
    _fake_forward,
)
activation_gradients: Callable[..., list[Tensor]] = step(
    "moe_bf16_activation_gradients(Tensor grad, Tensor y, Tensor w2, Tensor offs, Tensor token_of_row, "
    "Tensor row_weights, str activation, str layout, bool wants_2) -> Tensor[]",
    _activation_gradients,
    _fake_activation_gradients,
)
token_gradients: Callable[..., list[Tensor]] = step(
    "moe_bf16_token_gradients(Tensor dy, Tensor? x, Tensor? w13, Tensor offs, Tensor row_of, Tensor token_of_row) "
    "-> Tensor[]",
    _token_gradients,
    _fake_token_gradients,
)
