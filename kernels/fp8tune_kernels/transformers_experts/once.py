"""Expert weights of a model that are quantized once for all micro-batches of a step.

FP8 values exist inside a block of :func:`weights_once` alone, beside the parameters and not among them: the state dict
stays the same, and a copy or pickle of a module holds none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..gemm.gathered_weights import GatheredWeights, multipliable
from ..gemm.quantized_weights import Fingerprint, as_stored, cast_dtype, change_message, snapshot
from ..moe.expert_weights import ExpertWeights, quantize_down, quantize_gate_up

ATTRIBUTE = "_fp8tune_weights_once"

LAYER = "layer"
"""Stands for a recipe: FP8 values that ``moe_layer`` multiplies."""


class Quantized(NamedTuple):
    """FP8 values of a parameter, and the fingerprint of their origin."""

    fingerprint: Fingerprint
    values: Any
    """QuantizedWeights for ``fp8_grouped_mm``; for ``moe_layer`` a tuple of the tensors of ExpertWeights."""


class Held:
    """FP8 values of one module inside a block, by parameter and recipe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.quantized: dict[tuple[str, str], Quantized] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a copy of a module is in no block: nobody would end it


class Block:
    """FP8 values of a model's experts, from entry to exit."""

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
        """Raise RuntimeError, naming a parameter, if one that was quantized has changed. Waits for the devices once."""
        names, flags = list[str](), list[Tensor]()
        for module in self._modules:
            for (name, _), (fingerprint, _) in module.__dict__[ATTRIBUTE].quantized.items():
                names.append(fingerprint.name)
                is_other = not fingerprint.is_of(getattr(module, name))
                flags.append((fingerprint.changed() | is_other).to(flags[0].device if flags else None))
        are_changed = torch.stack(flags).tolist() if flags else []
        if changed := [name for name, is_changed in zip(names, are_changed, strict=True) if is_changed]:
            raise RuntimeError(change_message(changed))

    def free(self) -> None:
        """End the block."""
        for module in self._modules:
            module.__dict__.pop(ATTRIBUTE).quantized.clear()


def weights_of(module: Any, name: str, recipe: str) -> Any:
    """Return a parameter as ``fp8_grouped_mm`` takes it: as it lies, or quantized in a block or after an all-gather."""
    w: Tensor = getattr(module, name)
    if isinstance(w, GatheredWeights):
        _check_gathered(module, name)
        return multipliable(w)
    quantized = _in_block(module, name, w, recipe)
    return w if quantized is None else quantized.values


def layer_weights_of(module: Any, name: str) -> Tensor | ExpertWeights:
    """Return a parameter, (E, rows, columns), as ``moe_layer`` takes it: plain or quantized as :func:`weights_of`."""
    w: Tensor = getattr(module, name)
    if isinstance(w, GatheredWeights):
        _check_gathered(module, name)
        return w
    quantized = _in_block(module, name, w, LAYER)
    if module.is_transposed:
        w = w.transpose(1, 2)
    if quantized is None:
        return w
    quantized.fingerprint.check_use()
    return ExpertWeights(w, *quantized.values)


def _check_gathered(module: Any, name: str) -> None:
    if module.is_transposed:
        raise ValueError(f"{name} of {type(module).__name__} lies as (E, K, N): do not quantize it after a gather")


def _in_block(module: Any, name: str, w: Tensor, recipe: str) -> Quantized | None:
    """Return FP8 values of a parameter inside a block; None outside of one."""
    held: Held | None = getattr(module, ATTRIBUTE, None)
    if held is None or not isinstance(w, nn.Parameter):  # a parametrization, such as LoRA's, computes it at each use
        return None
    if not torch.compiler.is_compiling():
        return _quantized_in_block(module, name, recipe)
    quantized = held.quantized.get((name, recipe))
    if quantized is None:
        hint = "give weights_once the compiled model, or a dtype: it then quantizes at entry"
        raise RuntimeError(f"{name} of {type(module).__name__} is not quantized, and a compiled model cannot: {hint}")
    return quantized


@_disable_dynamo
def _quantized_in_block(module: Any, name: str, recipe: str) -> Quantized:
    """Quantize a parameter, unless it was in this block."""
    held: Held = module.__dict__[ATTRIBUTE]
    w: Tensor = getattr(module, name)
    quantized = held.quantized.get((name, recipe))
    if quantized is not None and not quantized.fingerprint.is_of(w):
        raise RuntimeError(change_message([quantized.fingerprint.name]))
    if quantized is None or quantized.fingerprint.dtype != cast_dtype(w):  # another autocast region
        path = f"{held.path}.{name}".removeprefix(".")
        if recipe == LAYER:
            quantized = _for_layer(module, name, path)
        else:
            of_w = snapshot(w, None, recipe, "EKN" if module.is_transposed else "ENK", path)
            quantized = Quantized(of_w.fingerprint, of_w)
        held.quantized[name, recipe] = quantized
    return quantized


def _for_layer(module: Any, name: str, path: str) -> Quantized:
    w = as_stored(getattr(module, name))
    fingerprint = Fingerprint(w, path)
    quantize = quantize_gate_up if name == "gate_up_proj" else quantize_down
    with torch.inference_mode(False):  # autograd saves the values
        plain = w.detach().to(fingerprint.dtype)
        result = quantize(plain.transpose(1, 2) if module.is_transposed else plain)
    return Quantized(fingerprint, (result.codes, result.scales, result.transposed, result.transposed_scales))
