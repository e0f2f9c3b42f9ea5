"""Rows in the order of their experts and back, by operations of torch, for layers that are several operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sort_rows(x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a row for each token and expert, the end of each expert's rows, their order and its inverse.

    ``ids``: (T, top_k); rows of an id past the last expert come last.
    """
    expert_of_row, order = torch.sort(ids.reshape(-1), stable=True)
    number = torch.arange(experts, device=ids.device, dtype=expert_of_row.dtype)
    offs = torch.searchsorted(expert_of_row, number, right=True, out_int32=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(ids.numel(), device=ids.device))
    return _gather(x, order, place, ids.shape[1]), offs, order, place


class _Gather(torch.autograd.Function):
    """Rows of tokens. The gradient adds a token's rows in order; autograd's own sorts, for several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return grad[place].view(len(grad) // ctx.top_k, ctx.top_k, grad.shape[1]).sum(1), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[place]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


_gather: Callable[..., Tensor] = _Gather.apply
scatter: Callable[..., Tensor] = _Scatter.apply
"""``(rows, order, place)`` -> rows in the order of tokens."""
