"""The expert MLP with an activation that has no fused kernel: two folded GEMMs, and torch's operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .expert_bias import add_bias, rows_of_experts
from .grouped_mm import fp8_grouped_mm

__all__ = ["COMPOSED", "ComposedActivationWarning", "composed_mlp"]

COMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu-tanh": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
    "relu": torch.relu,
}
"""Activations of the gate that have no fused kernel."""


class ComposedActivationWarning(UserWarning):
    """An activation without a fused kernel: two GEMMs and torch's operations. Given once for each activation."""


_warned: set[str] = set()


def composed_mlp(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    row_weights: Tensor | None,
    activation: str | Callable[[Tensor], Tensor],
    layout: str,
    float8_dtype: torch.dtype | None,
) -> Tensor:
    """``fp8_moe_mlp`` of operands that were checked; ``activation``: a key of COMPOSED, or a function of the gate."""
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", repr(activation))
    if not torch.compiler.is_compiling() and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"activation {name!r} has no fused kernel: the MLP is composed of two GEMMs and torch's operations",
            ComposedActivationWarning,
            stacklevel=3,  # of fp8_moe_mlp's caller
        )
    function = COMPOSED[activation] if isinstance(activation, str) else activation
    recipe = {"float8_dtype": float8_dtype, "recipe": "folded"}
    y = fp8_grouped_mm(x, w13.transpose(1, 2), offs, b13, **recipe)  # type: ignore[arg-type]
    gate, up = y.chunk(2, 1) if layout == "halves" else (y[:, 0::2], y[:, 1::2])
    h = function(gate) * up
    if row_weights is not None:
        h = h * row_weights[:, None].to(h.dtype)
    out = fp8_grouped_mm(h.contiguous(), w2.transpose(1, 2), offs, **recipe)  # type: ignore[arg-type]
    if b2 is None or row_weights is None:
        return out if b2 is None else add_bias(out, b2, offs)
    return torch.addmm(
        out, rows_of_experts(len(x), offs, out.dtype) * row_weights[:, None].to(out.dtype), b2.to(out.dtype)
    )
