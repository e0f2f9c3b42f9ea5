"""The forward pass of a module of experts as transformers declares it.

It is ``moe_layer``, or for a gate that this lacks, and on request, a ``fp8_grouped_mm`` for each of:

    rows     the hidden state of each token, once for each of its top_k experts, sorted by expert
    h        gate_up_proj of the rows, and the module's own gate; or up_proj and its activation
    out      down_proj of h, put back, times the routing weights, summed over the experts of each token

    hidden_states  (T, hidden)
    top_k_index    (T, top_k), integers; an index past the last expert, as expert parallelism has them, adds nothing
    top_k_weights  (T, top_k)

Of the module it reads what ``use_experts_implementation`` declares: ``num_experts``, ``has_gate``, ``has_bias``,
``is_transposed`` (weights lie as (E, K, N)) and ``_apply_gate``. Sizes must be multiples of 16: else both raise
ValueError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gemm.grouped_mm import fp8_grouped_mm
from .layer import gate_of, multiply_layer
from .once import weights_of

__all__ = ["Options", "experts_forward"]


@dataclass(frozen=True)
class Options:
    """Options for multiplying by the experts of a model."""

    precision: str = "fp8"
    is_layer: bool = True
    """Use ``moe_layer`` for modules whose gate it knows; otherwise ``fp8_grouped_mm`` for each GEMM."""
    recipe: str = "default"
    """Of ``fp8_grouped_mm``, as the next."""
    keep_fp8: tuple[str, ...] = ()


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, options: Options
) -> Tensor:
    """(T, hidden), in the dtype of ``hidden_states``."""
    if options.is_layer and (gate := gate_of(module)):
        out = multiply_layer(module, gate, hidden_states, top_k_index, top_k_weights, options.precision)
        return out.to(hidden_states.dtype)
    T, top_k = top_k_index.shape
    expert_of_row, order = torch.sort(top_k_index.reshape(-1), stable=True)
    experts = torch.arange(module.num_experts, device=order.device, dtype=expert_of_row.dtype)
    offs = torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(T * top_k, device=order.device))

    rows = _permute(hidden_states, order, place, top_k)
    h = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", rows, offs, options)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    out = _unpermute(_linear(module, "down_proj", h, offs, options), order, place)
    # as a batched product, which writes no rows: 0.8 to 3.3 times as long with its gradients on an H100
    return (out.view(T, top_k, out.shape[1]) * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _linear(module: Any, name: str, rows: Tensor, offs: Tensor, options: Options) -> Tensor:
    B_t = weights_of(module, name, options.recipe)
    if isinstance(B_t, Tensor) and not module.is_transposed:
        B_t = B_t.transpose(1, 2)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    how = {"precision": options.precision, "keep_fp8": options.keep_fp8, "recipe": options.recipe}
    return fp8_grouped_mm(rows, B_t, offs, bias, **how)  # type: ignore[arg-type]


class _Permute(torch.autograd.Function):
    """A row for each token and expert. Its gradient adds the rows of a token in order, where an index would sort."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return grad[place].view(len(grad) // ctx.top_k, ctx.top_k, grad.shape[1]).sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    """Rows back in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[place]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


_permute: Callable[..., Tensor] = _Permute.apply
_unpermute: Callable[..., Tensor] = _Unpermute.apply
