"""Tensors between guard bytes: memory that belongs to no tensor, where a write or a read past an end shows.

A kernel that writes one element too many changes nothing that a comparison of outputs sees, but a neighbour's tensor in
training. One that reads too many is right as long as its neighbour happens to be.
"""

from __future__ import annotations

from typing import Any

from fp8tune.measure.lazy import torch

GPU_GUARD_BYTES = 2 << 20
"""On either side of a tensor: the CUDA allocator's alignment of large blocks, so that guards do not move a tensor."""

CPU_GUARD_BYTES = 256 << 10
"""On the interpreter, where problems are small. To paint and read 2 MiB there took a quarter of a check."""

FILL = 0xA5


def guard_bytes(device: Any) -> int:
    """Return the number of guard bytes on either side of a tensor on a device."""
    return CPU_GUARD_BYTES if torch.device(device).type == "cpu" else GPU_GUARD_BYTES


def guarded(like: Any, device: str, offset: int = 0) -> Any:
    """Return uninitialised memory with the shape, strides, dtype and storage of ``like``, between two guards.

    ``like`` may be on ``meta``. What its storage holds beyond its elements (padding) is the tensor's own, and so are
    ``offset`` elements before it.
    """
    size, guard = like.element_size(), guard_bytes(device)
    own = offset * size + like.untyped_storage().nbytes()
    memory = torch.empty(guard + own + guard, dtype=torch.uint8, device=device)
    whole = memory[: memory.numel() // size * size].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), guard // size + offset + like.storage_offset())


def guarded_copy(tensor: Any, offset: int = 0) -> Any:
    """Copy a tensor between two guards on its device, ``offset`` elements past an aligned address."""
    copy = guarded(tensor, tensor.device, offset)
    own, before = own_bytes(copy), offset * tensor.element_size()
    own[:before] = FILL
    own[before:] = _storage(tensor)
    return copy


def own_bytes(tensor: Any) -> Any:
    """Return the memory between the guard bytes of a tensor of :func:`guarded`."""
    guard = guard_bytes(tensor.device)
    return _storage(tensor)[guard:-guard]


def fill(tensor: Any, byte: int = FILL) -> None:
    """Paint the guard bytes of a tensor of :func:`guarded`."""
    memory, guard = _storage(tensor), guard_bytes(tensor.device)
    memory[:guard].fill_(byte)
    memory[-guard:].fill_(byte)


def overwritten(tensor: Any, byte: int = FILL) -> str | None:
    """Say where guard bytes are not the byte that they were filled with, or return None."""
    memory, size = _storage(tensor), guard_bytes(tensor.device)
    for side, guard in (("after", memory[-size:]), ("before", memory[:size])):
        least, most = guard.aminmax()  # a hundred times as fast on a CPU as a comparison of each byte
        if bool(least == byte) and bool(most == byte):
            continue
        hits = (guard != byte).nonzero()
        if side == "after":
            return f"{len(hits)} bytes written past its end, the first {int(hits[0])} bytes after it"
        return f"{len(hits)} bytes written before its start, the last {size - int(hits[-1])} bytes before it"
    return None


def _storage(tensor: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
