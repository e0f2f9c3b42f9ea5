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
    """Decorate the ``backward`` of an autograd function: a second derivative of ``name`` raises RuntimeError.

    As ``torch.autograd.function.once_differentiable``, but with the name. Without it autograd goes through the rounding
    to FP8, and either fails somewhere inside or gives a wrong result.
    """
    message = f"{name} has no second derivative: differentiate it once, without create_graph=True"

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: torch.Tensor) -> Gradients:
            # a compiler traces with gradients enabled, and has its own refusal
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, *gradients)
            with torch.no_grad():
                answer = backward(ctx, *gradients)
            refuse: Any = torch._C._functions.DelayedError(message.encode(), len(answer))
            refused: Gradients = refuse(
                *(None if gradient is None else gradient.requires_grad_() for gradient in answer)
            )
            return refused

        return once

    return decorate
