"""Expert weights of a model that are quantized once for all micro-batches of a step.

FP8 values exist inside a block of :func:`weights_once` alone, beside the parameters and not among them: the state dict
stays the same, and a copy or pickle of a module holds none.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from fp8tune_kernels.gemm.gathered_weights import GatheredWeights, multipliable
from fp8tune_kernels.gemm.quantized_weights import QuantizedWeights, cast_dtype, change_message, snapshot

__all__ = ["Block", "weights_of"]

ATTRIBUTE = "_fp8tune_weights_once"


class Held:
    """FP8 values of one module inside a block, by parameter and recipe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.quantized: dict[tuple[str, str], QuantizedWeights] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a copy of a module is in no block: nobody would end it


class Block:
    """FP8 values of the experts of a model, from entry to exit."""

    def __init__(self, experts: dict[str, Any]) -> None:
        """Begin a block for experts by their path in the model. Raises RuntimeError for those that it cannot serve."""
        for path, module in experts.items():
            if getattr(module, ATTRIBUTE, None) is not None:
                raise RuntimeError(f"{path} is in a block of weights_once already: end that before another begins")
            if getattr(module, "_is_fsdp_managed_module", False):  # it gathers weights anew where they were
                raise RuntimeError(f"{path} is managed by FSDP: use quantize_after_all_gather, not weights_once")
            if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):
                raise RuntimeError(f"{path} is partitioned by ZeRO stage 3: weights_once needs stage 0, 1 or 2")
        self._modules = list(experts.values())
        for path, module in experts.items():
            module.__dict__[ATTRIBUTE] = Held(path)

    def check(self) -> None:
        """Raise RuntimeError, naming a parameter, if one that was quantized has changed. Waits for each device once."""
        flags: dict[torch.device, list[Tensor]] = {}
        names: dict[torch.device, list[str]] = {}
        for module in self._modules:
            held = module.__dict__[ATTRIBUTE]
            for (name, _), quantized in held.quantized.items():
                is_changed = quantized.changed()
                if not quantized.is_of(getattr(module, name)):
                    is_changed = torch.ones_like(is_changed)
                flags.setdefault(is_changed.device, []).append(is_changed)
                names.setdefault(is_changed.device, []).append(quantized.name)
        found = itertools.chain(
            *(zip(names[device], torch.stack(flags[device]).tolist(), strict=True) for device in flags)
        )
        if changed := [name for name, is_changed in found if is_changed]:
            raise RuntimeError(change_message(changed))

    def free(self) -> None:
        """End the block."""
        for module in self._modules:
            module.__dict__.pop(ATTRIBUTE).quantized.clear()


def weights_of(module: Any, name: str, recipe: str) -> Any:
    """A parameter as it lies, or quantized: inside a block once, and under FSDP2 after the all-gather."""
    w: Tensor = getattr(module, name)
    if isinstance(w, GatheredWeights):
        if module.is_transposed:
            raise ValueError(f"{name} of {type(module).__name__} lies as (E, K, N): do not quantize it after a gather")
        return multipliable(w)
    held = getattr(module, ATTRIBUTE, None)
    if held is None or not isinstance(w, nn.Parameter):  # a parametrization, such as LoRA's, computes it at each use
        return w
    if not torch.compiler.is_compiling():
        return _quantized_in_block(module, name, recipe)
    quantized = held.quantized.get((name, recipe))
    if quantized is None:
        hint = "give weights_once the compiled model, or a dtype: it then quantizes at entry"
        raise RuntimeError(f"{name} of {type(module).__name__} is not quantized, and a compiled model cannot: {hint}")
    return quantized


@_disable_dynamo
def _quantized_in_block(module: Any, name: str, recipe: str) -> QuantizedWeights:
    """Quantize a parameter, unless it was in this block."""
    held: Held = module.__dict__[ATTRIBUTE]
    w: Tensor = getattr(module, name)
    quantized = held.quantized.get((name, recipe))
    if quantized is not None and not quantized.is_of(w):
        raise RuntimeError(change_message([quantized.name]))
    if quantized is None or quantized.dtype != cast_dtype(w):  # another autocast region
        layout, path = "EKN" if module.is_transposed else "ENK", f"{held.path}.{name}".removeprefix(".")
        quantized = snapshot(w, None, recipe, layout, path)
        held.quantized[name, recipe] = quantized
    return quantized
