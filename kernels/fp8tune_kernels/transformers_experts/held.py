"""Codes of a module's weights, held from one micro-batch to the next and made anew when the weights have changed.

They are held beside the parameters, not among them: the state dict is what it was. A copy of a module, and what was
pickled of it, holds none. Codes of weights that an optimizer has changed are made anew right after its step, so that a
compiled model finds them. Any other change is seen at the next use, in eager mode.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8tune_kernels.gemm.gathered_weights import GatheredWeights, multipliable
from fp8tune_kernels.gemm.quantized_weights import QuantizedWeights, quantize_weights

__all__ = ["fresh_weights", "held_weights", "weights_of"]

ATTRIBUTE = "_fp8tune_held"


class Held:
    """The codes of one module, by the names of its parameters."""

    def __init__(self) -> None:
        self.codes: dict[str, QuantizedWeights] = {}
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Held, ())


_all: weakref.WeakSet[Held] = weakref.WeakSet()


def weights_of(module: Any, name: str, recipe: str, weights_once: bool) -> Any:
    """A parameter as it lies, or what was quantized of it: held, or under FSDP2 made after the all-gather."""
    w: Tensor = getattr(module, name)
    if isinstance(w, GatheredWeights):
        if module.is_transposed:
            raise ValueError(f"{name} of {type(module).__name__} lies as (E, K, N): do not quantize it after a gather")
        return multipliable(w)
    return held_weights(module, name, recipe) if weights_once else w


def held_weights(module: Any, name: str, recipe: str) -> QuantizedWeights:
    """The codes of a parameter as it is now, for a recipe of ``fp8_grouped_mm``.

    In ``torch.compile`` they must be there. Raises RuntimeError where they are not, and where they are old.
    """
    if not torch.compiler.is_compiling():
        return fresh_weights(module, name, recipe)
    held = getattr(module, ATTRIBUTE, None)
    if held is None or name not in held.codes or held.codes[name].recipe != recipe:
        raise RuntimeError(f"{name} of the experts is not quantized: call hold_weights(model) before torch.compile")
    codes: QuantizedWeights = held.codes[name]
    return codes


@_disable_dynamo
def fresh_weights(module: Any, name: str, recipe: str) -> QuantizedWeights:
    """The codes of a parameter as it is now, made where there are none or old ones."""
    if getattr(module, "_is_fsdp_managed_module", False):  # gathers weights anew where they were, which nothing tells
        raise RuntimeError(f"{name} is gathered anew by FSDP: call quantize_after_all_gather, and choose no '-once'")
    held = module.__dict__.get(ATTRIBUTE)
    if held is None:
        held = module.__dict__[ATTRIBUTE] = Held()
    w: Tensor = getattr(module, name)
    codes: QuantizedWeights | None = held.codes.get(name)
    if codes is None or codes.recipe != recipe or not codes.is_of(w):
        codes = quantize_weights(w, recipe=recipe, layout="EKN" if module.is_transposed else "ENK")
        held.codes[name] = codes
    elif not codes.is_current:
        codes.requantize()
    _refresh_after_steps()  # a hook after that of quantized weights, which marks the codes
    return codes


@functools.cache
def _refresh_after_steps() -> None:
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for held in list(_all):
        for codes in held.codes.values():
            if codes.is_stepped:
                with torch.autocast(codes.weights.device.type, codes.dtype, codes.dtype != codes.weights.dtype):
                    codes.requantize()
