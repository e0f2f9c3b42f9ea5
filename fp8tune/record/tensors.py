"""Tensors of a launch as a recording holds them: layout and memory, and what their values are like."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8tune.autotuned.encoding import Unrecordable, encoded
from fp8tune.recording import Tensor

MOST_VALUE_BYTES = 64 * 1024
SAMPLED = 1 << 20
"""Elements of a floating-point tensor that its statistics are of, at most."""


def is_tensor(value: Any) -> bool:
    """Whether Triton takes the value as a pointer."""
    return hasattr(value, "data_ptr") and hasattr(value, "dtype")


def is_descriptor(value: Any) -> bool:
    """Whether it is a ``TensorDescriptor`` made on the host."""
    module = sys.modules.get("triton.tools.tensor_descriptor")
    return module is not None and isinstance(value, module.TensorDescriptor)


def described(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name -> what can be told of each tensor or descriptor without reading it. Raises Unrecordable."""
    bases = {name: value.base if is_descriptor(value) else value for name, value in tensors.items()}
    first: dict[int, int] = {}  # storage -> its lowest address that an argument has
    for base in bases.values():
        storage = base.untyped_storage().data_ptr()
        first[storage] = min(first.get(storage, base.data_ptr()), base.data_ptr())
    numbers = {storage: number for number, storage in enumerate(first)}
    found: dict[str, Tensor] = {}
    for name, base in bases.items():
        value, storage, address = tensors[name], base.untyped_storage().data_ptr(), base.data_ptr()
        offset, rest = divmod(address - first[storage], base.element_size())
        if rest:
            raise Unrecordable(f"argument {name} shares memory with another, not a whole number of elements apart")
        descriptor = tuple(value.block_shape) if is_descriptor(value) else None
        rounds = getattr(value, "round_f32_to_tf32", False)  # not in Triton 3.6
        if descriptor is not None and (value.padding != "zero" or rounds):
            raise Unrecordable(f"argument {name} is a TensorDescriptor with options, which a recording cannot hold")
        found[name] = Tensor(
            name=name,
            dtype=str(base.dtype).removeprefix("torch."),
            shape=tuple(map(int, base.shape if descriptor is None else value.shape)),
            strides=tuple(map(int, base.stride() if descriptor is None else value.strides)),
            alignment=min(16, address & -address) if address else 16,
            storage=numbers[storage],
            offset=offset,
            descriptor=descriptor,
        )
    return found


def with_values(described: Mapping[str, Tensor], tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same with statistics, and the values of small integer tensors: one synchronization a device."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    wanted: dict[Any, list[tuple[str, str, Any]]] = {}
    with torch.no_grad(), _disable_current_modes():
        for name, value in tensors.items():
            base = value.base if is_descriptor(value) else value
            if not isinstance(base, torch.Tensor) or base.numel() == 0:
                continue
            try:
                kind, read = _asked(torch, base)
            except Exception:  # a dtype that torch cannot compute with, such as four-bit floats
                continue
            wanted.setdefault(base.device, []).append((name, kind, read))
        found = dict(described)
        for parts in wanted.values():
            flat = torch.cat([read for _, _, read in parts]).tolist()
            for name, kind, read in parts:
                mine, flat = flat[: len(read)], flat[len(read) :]
                found[name] = replace(found[name], **_fields(torch, kind, mine))
    return found


def _asked(torch: Any, tensor: Any) -> tuple[str, Any]:
    """What is read of one tensor: a kind, and numbers as int64 on its device."""
    if not tensor.dtype.is_floating_point:
        if tensor.numel() * tensor.element_size() <= MOST_VALUE_BYTES:
            return "values", tensor.reshape(-1).to(torch.int64)
        least, most = (tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor).aminmax()
        is_sorted = (tensor[1:] >= tensor[:-1]).all() if tensor.dim() == 1 else torch.zeros_like(least)
        return "range", torch.stack([least.to(torch.int64), most.to(torch.int64), is_sorted.to(torch.int64)])
    values = _some(tensor).float()
    is_finite = values.isfinite()
    share = is_finite.double().mean()
    finite = torch.where(is_finite, values, 0.0).double()
    mean = finite.mean() / share
    spread = (torch.where(is_finite, values.double() - mean, 0.0).square().mean() / share).sqrt()
    least = torch.where(is_finite, values, torch.inf).min()
    most = torch.where(is_finite, values, -torch.inf).max()
    first = values.flatten()[0]
    is_constant = ((values == first) | (values.isnan() & first.isnan())).all()
    numbers = (least, most, mean, spread, (values == 0).double().mean(), 1 - share, first, is_constant)
    return "floats", torch.stack([number.double() for number in numbers]).view(torch.int64)


def _some(tensor: Any) -> Any:
    """A view of at most :data:`SAMPLED` elements, evenly spaced: nothing large is copied."""
    while tensor.numel() > SAMPLED:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        step = min(tensor.shape[longest], -(-tensor.numel() // SAMPLED))
        tensor = tensor[(slice(None),) * longest + (slice(None, None, max(2, step)),)]
    return tensor


def _fields(torch: Any, kind: str, numbers: Sequence[int]) -> dict[str, Any]:
    if kind == "values":
        is_sorted = all(one <= other for one, other in itertools.pairwise(numbers))
        extremes = {"least": float(min(numbers)), "most": float(max(numbers))}
        return {"values": tuple(numbers), "is_sorted": is_sorted, **extremes}
    if kind == "range":
        return {"least": float(numbers[0]), "most": float(numbers[1]), "is_sorted": bool(numbers[2])}
    values = torch.tensor(numbers, dtype=torch.int64).view(torch.float64).tolist()
    *statistics, first, is_constant = values
    names = ("least", "most", "mean", "deviation", "zeros", "not_finite")
    known = {name: value for name, value in zip(names, statistics, strict=True) if abs(value) < float("inf")}
    return known | ({"constant": encoded(first, "")} if is_constant else {})
