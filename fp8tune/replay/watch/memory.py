"""Describe the tensors of a launch: layout and memory, then what their values are like."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fp8tune.replay.recording import Tensor, pack
from fp8tune.replay.values import Unrecordable, encoded

LISTED = 64
"""Integers that a recording lists one by one; more are packed."""
MOST_INTEGERS, MOST_PACKED_BYTES, MOST_BYTES_IN_ALL = 1 << 21, 4 << 20, 64 << 20
"""Larger integer tensors are described by their range alone: they would make recordings that nobody can send."""
SAMPLED = 1 << 20
"""Elements of a floating-point tensor that its statistics are computed of, at most."""

_packed_bytes = 0


def is_tensor(value: Any) -> bool:
    """Return True if Triton takes the value as a pointer."""
    return hasattr(value, "data_ptr") and hasattr(value, "dtype")


def is_descriptor(value: Any) -> bool:
    """Return True for a ``TensorDescriptor`` made on the host."""
    module = sys.modules.get("triton.tools.tensor_descriptor")
    return module is not None and isinstance(value, module.TensorDescriptor)


def flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an argument, or the items of a tuple with tensors under names such as ``parts[0]``. Raises Unrecordable."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    if not any(_has_memory(item) for item in items):
        yield name, value
    elif type(value) is not tuple:
        raise Unrecordable(f"argument {name} is a {type(value).__name__} with tensors: pass them one by one")
    else:
        for index, item in enumerate(value):
            yield from flattened(f"{name}[{index}]", item)


def _has_memory(value: Any) -> bool:
    return is_tensor(value) or is_descriptor(value) or (isinstance(value, tuple) and any(map(_has_memory, value)))


def described(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Describe tensors and descriptors by name, without reading any element. Raises Unrecordable."""
    bases = {name: value.base if is_descriptor(value) else value for name, value in tensors.items()}
    first: dict[int, int] = {}  # storage -> its lowest address that an argument has
    for base in bases.values():
        storage = base.untyped_storage().data_ptr()
        first[storage] = min(first.get(storage, base.data_ptr()), base.data_ptr())
    numbers = {storage: number for number, storage in enumerate(first)}
    result: dict[str, Tensor] = {}
    for name, base in bases.items():
        value, storage, address = tensors[name], base.untyped_storage().data_ptr(), base.data_ptr()
        offset, rest = divmod(address - first[storage], base.element_size())
        if rest:
            raise Unrecordable(f"argument {name} shares memory with another, not a whole number of elements apart")
        descriptor = tuple(value.block_shape) if is_descriptor(value) else None
        rounds = getattr(value, "round_f32_to_tf32", False)  # not in Triton 3.6
        if descriptor is not None and (value.padding != "zero" or rounds):
            raise Unrecordable(f"argument {name} is a TensorDescriptor with options, which a recording cannot hold")
        result[name] = Tensor(
            name=name,
            dtype=str(base.dtype).removeprefix("torch."),
            shape=tuple(map(int, base.shape if descriptor is None else value.shape)),
            strides=tuple(map(int, base.stride() if descriptor is None else value.strides)),
            alignment=min(16, address & -address) if address else 16,
            storage=numbers[storage],
            offset=offset,
            descriptor=descriptor,
        )
    return result


def with_values(described: Mapping[str, Tensor], tensors: Mapping[str, Any], stores: bool = True) -> dict[str, Tensor]:
    """Add statistics and, if ``stores``, the elements of integer tensors: one synchronization a device."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    queries: dict[Any, list[tuple[str, str, Any]]] = {}
    with torch.no_grad(), _disable_current_modes():
        for name, value in tensors.items():
            base = value.base if is_descriptor(value) else value
            if not isinstance(base, torch.Tensor) or base.numel() == 0:
                continue
            try:
                kind, numbers = _query(torch, base, stores)
            except Exception:  # a dtype that torch cannot compute with, such as four-bit floats
                continue
            queries.setdefault(base.device, []).append((name, kind, numbers))
        result = dict(described)
        for parts in queries.values():
            flat = torch.cat([numbers for _, _, numbers in parts]).cpu()
            for name, kind, numbers in parts:
                own, flat = flat[: len(numbers)], flat[len(numbers) :]
                result[name] = replace(result[name], **_fields(torch, kind, own))
    return result


def _query(torch: Any, tensor: Any, stores: bool) -> tuple[str, Any]:
    """Return what is read of one tensor: a kind, and numbers as int64 on its device."""
    if not tensor.dtype.is_floating_point:
        if tensor.numel() <= (MOST_INTEGERS if stores else LISTED):
            return "values", tensor.reshape(-1).to(torch.int64)
        least, most = (tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor).aminmax()
        is_sorted = (tensor[1:] >= tensor[:-1]).all() if tensor.dim() == 1 else torch.zeros_like(least)
        return "range", torch.stack([least.to(torch.int64), most.to(torch.int64), is_sorted.to(torch.int64)])
    values = _sample(tensor).float()
    is_finite = values.isfinite()
    share = is_finite.double().mean()
    mean = torch.where(is_finite, values, 0.0).double().mean() / share
    spread = (torch.where(is_finite, values.double() - mean, 0.0).square().mean() / share).sqrt()
    least = torch.where(is_finite, values, torch.inf).min()
    most = torch.where(is_finite, values, -torch.inf).max()
    first = values.flatten()[0]
    is_constant = ((values == first) | (values.isnan() & first.isnan())).all()
    numbers = (least, most, mean, spread, (values == 0).double().mean(), 1 - share, first, is_constant)
    return "floats", torch.stack([number.double() for number in numbers]).view(torch.int64)


def _sample(tensor: Any) -> Any:
    """Return a view of at most :data:`SAMPLED` elements, evenly spaced: nothing large is copied."""
    while tensor.numel() > SAMPLED:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        step = min(tensor.shape[longest], -(-tensor.numel() // SAMPLED))
        tensor = tensor[(slice(None),) * longest + (slice(None, None, max(2, step)),)]
    return tensor


def _fields(torch: Any, kind: str, numbers: Any) -> dict[str, Any]:
    """Return fields of a Tensor, of the numbers that :func:`_query` asked for."""
    global _packed_bytes
    if kind == "values":
        is_sorted = bool((numbers[1:] >= numbers[:-1]).all())
        known = {"least": float(numbers.min()), "most": float(numbers.max()), "is_sorted": is_sorted}
        if len(numbers) <= LISTED:
            return {"values": tuple(numbers.tolist()), **known}
        if _packed_bytes > MOST_BYTES_IN_ALL:
            return known
        packed = pack(ctypes.string_at(numbers.data_ptr(), 8 * len(numbers)))  # NumPy may be missing
        _packed_bytes += len(packed)
        return {"packed": packed, **known} if len(packed) <= MOST_PACKED_BYTES else known
    if kind == "range":
        least, most, is_sorted = numbers.tolist()
        return {"least": float(least), "most": float(most), "is_sorted": bool(is_sorted)}
    *statistics, first, is_constant = numbers.view(torch.float64).tolist()
    names = ("least", "most", "mean", "deviation", "zeros", "not_finite")
    result = {name: value for name, value in zip(names, statistics, strict=True) if abs(value) < float("inf")}
    return result | ({"constant": encoded(first, "")} if is_constant else {})
