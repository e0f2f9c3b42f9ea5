"""Codes of a module's weights, held from one micro-batch to the next and made anew when the weights have changed.

They are held beside the parameters, not among them: the state dict is what it was. A copy of a module, and what was
pickled of it, holds none. Codes of weights that an optimizer has changed are made anew right after its step, so that a
compiled model finds them. Any other change is seen at the next use, in eager mode.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8tune_kernels.gemm.quantized_weights import QuantizedWeights, quantize_weights

__all__ = ["held_weights", "hold_weights"]

ATTRIBUTE = "_fp8tune_held"


class Held:
    """The codes of one module, by the names of its parameters."""

    def __init__(self) -> None:
        self.codes: dict[str, QuantizedWeights] = {}
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Held, ())


_all: weakref.WeakSet[Held] = weakref.WeakSet()


def held_weights(module: nn.Module, name: str) -> QuantizedWeights:
    """The codes of a parameter as it is now.

    In ``torch.compile`` they must be there. Raises RuntimeError where they are not, and where they are old.
    """
    if not torch.compiler.is_compiling():
        return _fresh(module, name)
    held = getattr(module, ATTRIBUTE, None)
    if held is None or name not in held.codes:
        raise RuntimeError(f"{name} of the experts is not quantized: call hold_weights(model) before torch.compile")
    codes: QuantizedWeights = held.codes[name]
    return codes


def hold_weights(model: nn.Module) -> int:
    """Quantize the weights of all experts of a model now; how many there are. For ``torch.compile``, beforehand.

    Call it in the autocast region that the model runs in. In eager mode each use does it.
    """
    found = 0
    for module in model.modules():
        for name in _names(module):
            _fresh(module, name)
            found += 1
    return found


def _names(module: nn.Module) -> Iterator[str]:
    if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
        yield from (name for name in ("gate_up_proj", "up_proj", "down_proj") if hasattr(module, name))


@_disable_dynamo
def _fresh(module: nn.Module, name: str) -> QuantizedWeights:
    held = module.__dict__.get(ATTRIBUTE)
    if held is None:
        held = module.__dict__[ATTRIBUTE] = Held()
    w: Tensor = getattr(module, name)
    codes = held.codes.get(name)
    if codes is None or not codes.is_of(w):
        codes = held.codes[name] = quantize_weights(w, layout="EKN" if module.is_transposed else "ENK")
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
