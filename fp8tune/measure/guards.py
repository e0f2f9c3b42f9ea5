"""Tensors between two fences: memory that belongs to no tensor, where a write or a read past an end shows.

A kernel that writes one element too many changes nothing that a comparison of outputs sees; in training it changes a
neighbour's tensor. One that reads too many is right as long as its neighbour happens to be. Knows no kernel and no
problem.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FENCE_BYTES", "PAINT", "broken", "fenced", "moved", "own_bytes", "paint"]

FENCE_BYTES = 2 << 20
"""On either side of a tensor: what the CUDA allocator aligns large blocks to, so that a tensor lies as it would
without guards."""

PAINT = 0xA5


def fenced(like: Any, device: str, offset: int = 0) -> Any:
    """Uninitialised memory on ``device`` with the shape, strides, dtype and storage of ``like``, between two guards.

    ``like`` may be on ``meta``. What its storage holds beyond its elements (padding) is the tensor's own; so are
    ``offset`` elements before it.
    """
    import torch

    size = like.element_size()
    own = offset * size + like.untyped_storage().nbytes()
    memory = torch.empty(FENCE_BYTES + own + FENCE_BYTES, dtype=torch.uint8, device=device)
    whole = memory[: memory.numel() // size * size].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), FENCE_BYTES // size + offset + like.storage_offset())


def moved(tensor: Any, offset: int = 0) -> Any:
    """A copy of a tensor between two guards, on its device, that begins ``offset`` elements past an aligned address."""
    copy = fenced(tensor, tensor.device, offset)
    own = own_bytes(copy)
    own[: offset * tensor.element_size()] = PAINT
    own[offset * tensor.element_size() :] = _bytes(tensor)
    return copy


def own_bytes(tensor: Any) -> Any:
    """The memory between the fences of a tensor of :func:`fenced`."""
    return _bytes(tensor)[FENCE_BYTES:-FENCE_BYTES]


def paint(tensor: Any, byte: int = PAINT) -> None:
    """Paint both fences of a tensor of :func:`fenced`."""
    for fence in _fences(tensor):
        fence.fill_(byte)


def broken(tensor: Any, byte: int = PAINT) -> str | None:
    """Where the fences of a tensor have other bytes than were painted, or None."""
    before, after = _fences(tensor)
    if not _is_clean(after, byte):
        hit = after != byte
        return f"{int(hit.sum())} bytes written past its end, the first {int(hit.nonzero()[0])} bytes after it"
    if not _is_clean(before, byte):
        hit = before != byte
        last = FENCE_BYTES - int(hit.nonzero()[-1])
        return f"{int(hit.sum())} bytes written before its start, the last {last} bytes before it"
    return None


def _is_clean(fence: Any, byte: int) -> bool:
    least, most = fence.aminmax()  # a hundred times as fast on a CPU as to compare each
    return bool(least == byte) and bool(most == byte)


def _fences(tensor: Any) -> tuple[Any, Any]:
    memory = _bytes(tensor)
    return memory[:FENCE_BYTES], memory[-FENCE_BYTES:]


def _bytes(tensor: Any) -> Any:
    """The whole storage of a tensor."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
