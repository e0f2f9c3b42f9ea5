"""What is right where no reference is named: what the config declared first gives, and gives again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8tune.autotuned.launching import Launcher
from fp8tune.autotuned.tensors import Case
from fp8tune.records import NamedInts
from fp8tune_kernels.spec import Tolerance

_POISONS = (0x7B, 0x84)
"""Bytes of large values: an element that has both in turn was not written."""


def outputs(
    launcher: Launcher, configs: Sequence[NamedInts], inputs: tuple[Any, ...], bound: Tolerance | None
) -> tuple[Any, ...]:
    """The outputs of the first config that can be launched; as float64 where there is a bound.

    Elements that it does not write are noted in the :class:`Case` and are zeros here. Raises ValueError for a config
    that does not agree with itself, what the last config raised where none can be launched.
    """
    case: Case = inputs[-1]
    failure: Exception = ValueError("every config of the kernel is pruned")
    for config in configs:
        try:
            runs = [_launched(launcher, config, inputs, poison) for poison in _POISONS]
        except Exception as error:
            if any(sign in str(error) for sign in ("CUDA error", "HIP error", "AcceleratorError", "illegal memory")):
                raise
            failure = error
            continue
        return tuple(
            _agreed(case, index, config, first, second, bound)
            for index, (first, second) in enumerate(zip(*runs, strict=True))
        )
    raise failure


def _launched(launcher: Launcher, config: NamedInts, inputs: tuple[Any, ...], poison: int) -> tuple[Any, ...]:
    import torch

    case: Case = inputs[-1]
    case.untouched.clear()
    made = case.outputs()
    for output in made:
        _bits(output).fill_(_signed(poison, output.element_size()))
    launcher.prepare(inputs, made)
    if launcher.has_hook:
        launcher.hook(config, inputs, made)
    launcher.launch(config, inputs, made)
    if case.device.startswith("cuda"):
        torch.cuda.synchronize()
    return made


def _agreed(case: Case, index: int, config: NamedInts, first: Any, second: Any, bound: Tolerance | None) -> Any:
    size = first.element_size()
    untouched = _bits(first) == _signed(_POISONS[0], size)
    untouched &= _bits(second) == _signed(_POISONS[1], size)
    unequal = (_bits(first) != _bits(second)) & ~untouched
    if first.is_floating_point() and bool(unequal.any()):
        one, other = first.double(), second.double()
        unequal &= ~(one.isnan() & other.isnan())
        if bound is not None:
            unequal &= ~((one - other).abs() <= bound.absolute + bound.relative * one.abs())
    if count := int(unequal.sum()):
        name = case.written[index].name
        raise ValueError(
            f"the first config ({config}) is not deterministic: launched twice, {count} of {first.numel()} elements of "
            f"{name} differ: ask for --check tolerance or exact-inputs, or name a --reference"
        )
    if bool(untouched.any()):
        case.untouched[index] = untouched
        _bits(second).masked_fill_(untouched, 0)
    return second.double() if bound is not None and second.is_floating_point() else second


def _signed(byte: int, size: int) -> int:
    """The integer of so many bytes, as torch's signed types (and uint8) take it."""
    return int.from_bytes(bytes([byte] * size), signed=size > 1)


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
