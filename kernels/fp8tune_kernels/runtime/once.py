"""Gradients that have no gradient of their own, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["differentiable_once"]

Gradients = tuple[torch.Tensor | None, ...]
Backward = Callable[..., Gradients]


def differentiable_once(name: str) -> Callable[[Backward], Backward]:
    """Decorate the ``backward`` of an autograd function: a second derivative of ``name`` is an error of one line.

    Without it autograd goes through the rounding to FP8, and either fails somewhere inside or gives a wrong result.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: torch.Tensor) -> Gradients:
            # a compiler traces with gradients enabled, and has its own refusal
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, *gradients)
            with torch.no_grad():
                found = backward(ctx, *gradients)
            return tuple(None if gradient is None else _refuse(name, gradient.requires_grad_()) for gradient in found)

        return once

    return decorate


class _Refused(torch.autograd.Function):
    """Hands a gradient through, as one that requires a gradient itself; raises where that is asked for."""

    @staticmethod
    def forward(ctx: Any, name: str, gradient: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        raise RuntimeError(f"{ctx.name} has no second derivative: differentiate it once, without create_graph=True")


_refuse: Callable[..., torch.Tensor] = _Refused.apply
