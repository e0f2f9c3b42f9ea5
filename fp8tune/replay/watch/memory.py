"""Describe the tensors of a launch: layout and memory, then what their values are like."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fp8tune.replay.lazy import torch
from fp8tune.replay.recording import Tensor, pack
from fp8tune.replay.values import Unrecordable, encoded
from fp8tune_kernels.tuners import is_descriptor, tensor_in

LISTED = 64  # integers that a recording lists one by one; more are packed
MOST_INTEGERS, MOST_PACKED_BYTES, MOST_BYTES_IN_ALL = 1 << 21, 4 << 20, 64 << 20
"""Larger integer tensors are described by their range alone: they would make recordings that nobody can send."""
SAMPLED = 1 << 20  # elements of a floating-point tensor that its statistics are computed of, at most

_packed_bytes = 0


def described(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Describe tensors and descriptors by name, without reading any element. Raises Unrecordable."""
    bases = {name: tensor_in(value) for name, value in tensors.items()}
    first: dict[int, int] = {}  # storage -> its lowest address that an argument has
    for base in bases.values():
        storage = base.untyped_storage().data_ptr()
        first[storage] = min(first.get(storage, base.data_ptr()), base.data_ptr())
    result: dict[str, Tensor] = {}
    for name, base in bases.items():
        value, storage, address = tensors[name], base.untyped_storage().data_ptr(), base.data_ptr()
        offset, rest = divmod(address - first[storage], base.element_size())
        if rest:
            raise Unrecordable(f"argument {name} shares memory with another, not a whole number of elements apart")
        shape, strides, block = base.shape, base.stride(), None
        if is_descriptor(value):
            shape, strides, block = value.shape, value.strides, tuple(value.block_shape)
            if value.padding != "zero" or getattr(value, "round_f32_to_tf32", False):  # not in Triton 3.6
                raise Unrecordable(f"argument {name} is a TensorDescriptor with options, which a recording cannot hold")
        result[name] = Tensor(
            name=name,
            dtype=str(base.dtype).removeprefix("torch."),
            shape=tuple(map(int, shape)),
            strides=tuple(map(int, strides)),
            alignment=min(16, address & -address) if address else 16,
            storage=list(first).index(storage),
            offset=offset,
            descriptor=block,
        )
    return result


def with_values(described: Mapping[str, Tensor], tensors: Mapping[str, Any], stores: bool = True) -> dict[str, Tensor]:
    """Add statistics and, if ``stores``, the elements of integer tensors: one synchronization a tensor."""
    result = dict(described)
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        for name, value in tensors.items():
            base = tensor_in(value)
            if isinstance(base, torch.Tensor) and base.numel():
                with contextlib.suppress(Exception):  # a dtype that torch cannot compute with, such as four-bit floats
                    facts = _floats(base) if base.dtype.is_floating_point else _integers(base, stores)
                    result[name] = replace(result[name], **facts)
    return result


def _integers(tensor: Any, stores: bool) -> dict[str, Any]:
    """Return the range of integers, and all of them if they are few enough to be stored."""
    global _packed_bytes
    flat = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    count, is_whole = tensor.numel(), tensor.numel() <= (MOST_INTEGERS if stores else LISTED)
    if is_whole:
        flat = flat.reshape(-1).to(torch.int64).cpu()
    least, most = flat.aminmax()
    is_sorted = flat.dim() == 1 and bool((flat[1:] >= flat[:-1]).all())
    facts = {"least": float(least), "most": float(most), "is_sorted": is_sorted}
    if is_whole and count <= LISTED:
        return {"values": tuple(flat.tolist()), **facts}
    if not is_whole or _packed_bytes > MOST_BYTES_IN_ALL:
        return facts
    packed = pack(ctypes.string_at(flat.data_ptr(), 8 * count))  # NumPy may be missing
    _packed_bytes += len(packed)
    return {"packed": packed, **facts} if len(packed) <= MOST_PACKED_BYTES else facts


def _floats(tensor: Any) -> dict[str, Any]:
    """Return statistics of a sample, and the value of all elements if they are equal."""
    while tensor.numel() > SAMPLED:  # every n-th element of the longest dimension: nothing large is copied
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        step = min(tensor.shape[longest], -(-tensor.numel() // SAMPLED))
        tensor = tensor[(slice(None),) * longest + (slice(None, None, max(2, step)),)]
    values = tensor.float()
    is_finite, first = values.isfinite(), values.flatten()[0]
    share = is_finite.double().mean()
    mean = torch.where(is_finite, values, 0.0).double().mean() / share
    statistics = {
        "least": torch.where(is_finite, values, torch.inf).min(),
        "most": torch.where(is_finite, values, -torch.inf).max(),
        "mean": mean,
        "deviation": (torch.where(is_finite, values.double() - mean, 0.0).square().mean() / share).sqrt(),
        "zeros": (values == 0).double().mean(),
        "not_finite": 1 - share,
    }
    is_constant = ((values == first) | (values.isnan() & first.isnan())).all()
    every = torch.stack([number.double() for number in (*statistics.values(), first, is_constant)])
    *numbers, value, is_constant = every.tolist()
    facts = {name: number for name, number in zip(statistics, numbers, strict=True) if math.isfinite(number)}
    return facts | ({"constant": encoded(value, "")} if is_constant else {})
