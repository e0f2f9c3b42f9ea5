"""Tensors between guard bytes: memory that belongs to no tensor, where a write or a read past an end shows.

A kernel that writes one element too many changes nothing that a comparison of outputs sees; in training it changes a
neighbour's tensor. One that reads too many is right as long as its neighbour happens to be. Knows no kernel and no
problem.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CPU_GUARD_BYTES", "FILL", "GPU_GUARD_BYTES", "fill", "guard_bytes", "guarded", "guarded_copy", "own_bytes"]

GPU_GUARD_BYTES = 2 << 20
"""On either side of a tensor: what the CUDA allocator aligns large blocks to, so that a tensor lies as it would
without guards."""

CPU_GUARD_BYTES = 256 << 10
"""On the interpreter, where problems are small. Painting and reading 2 MiB there took a quarter of a check."""

FILL = 0xA5


def guard_bytes(device: Any) -> int:
    """How many guard bytes lie on either side of a tensor on a device."""
    import torch

    return CPU_GUARD_BYTES if torch.device(device).type == "cpu" else GPU_GUARD_BYTES


def guarded(like: Any, device: str, offset: int = 0) -> Any:
    """Uninitialised memory on ``device`` with the shape, strides, dtype and storage of ``like``, between two guards.

    ``like`` may be on ``meta``. What its storage holds beyond its elements (padding) is the tensor's own; so are
    ``offset`` elements before it.
    """
    import torch

    size, guard = like.element_size(), guard_bytes(device)
    own = offset * size + like.untyped_storage().nbytes()
    memory = torch.empty(guard + own + guard, dtype=torch.uint8, device=device)
    whole = memory[: memory.numel() // size * size].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), guard // size + offset + like.storage_offset())


def guarded_copy(tensor: Any, offset: int = 0) -> Any:
    """A copy of a tensor between two guards, on its device, that begins ``offset`` elements past an aligned address."""
    copy = guarded(tensor, tensor.device, offset)
    own = own_bytes(copy)
    own[: offset * tensor.element_size()] = FILL
    own[offset * tensor.element_size() :] = _bytes(tensor)
    return copy


def own_bytes(tensor: Any) -> Any:
    """The memory between the guard bytes of a tensor of :func:`guarded`."""
    guard = guard_bytes(tensor.device)
    return _bytes(tensor)[guard:-guard]


def fill(tensor: Any, byte: int = FILL) -> None:
    """Paint the guard bytes of a tensor of :func:`guarded`."""
    for guard in _guards(tensor):
        guard.fill_(byte)


def overwritten(tensor: Any, byte: int = FILL) -> str | None:
    """Where the guard bytes of a tensor have other bytes than were filled in, or None."""
    before, after = _guards(tensor)
    if not _is_clean(after, byte):
        hit = after != byte
        return f"{int(hit.sum())} bytes written past its end, the first {int(hit.nonzero()[0])} bytes after it"
    if not _is_clean(before, byte):
        hit = before != byte
        last = len(before) - int(hit.nonzero()[-1])
        return f"{int(hit.sum())} bytes written before its start, the last {last} bytes before it"
    return None


def _is_clean(guard: Any, byte: int) -> bool:
    least, most = guard.aminmax()  # a hundred times as fast on a CPU as to compare each
    return bool(least == byte) and bool(most == byte)


def _guards(tensor: Any) -> tuple[Any, Any]:
    memory, guard = _bytes(tensor), guard_bytes(tensor.device)
    return memory[:guard], memory[-guard:]


def _bytes(tensor: Any) -> Any:
    """The whole storage of a tensor."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
