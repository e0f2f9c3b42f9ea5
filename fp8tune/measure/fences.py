"""Outputs between two fences: memory that belongs to no output, where a write past an end shows.

A kernel that writes one element too many changes nothing that a comparison of outputs sees; in training it changes a
neighbour's tensor. Knows no kernel and no problem.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FENCE_BYTES", "broken", "fenced", "paint"]

FENCE_BYTES = 2 << 20
"""On either side of an output: what the CUDA allocator aligns large blocks to, so that an output lies as it would
without fences."""

PAINT = 0xA5


def fenced(like: Any, device: str) -> Any:
    """Uninitialised memory on ``device`` with the shape, strides, dtype and storage of ``like``, between two fences.

    ``like`` may be on ``meta``. What its storage holds beyond its elements (padding) is the output's own.
    """
    import torch

    own_bytes = like.untyped_storage().nbytes()
    memory = torch.empty(FENCE_BYTES + own_bytes + FENCE_BYTES, dtype=torch.uint8, device=device)
    offset = FENCE_BYTES // like.element_size() + like.storage_offset()
    whole = memory[: memory.numel() // like.element_size() * like.element_size()].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), offset)


def paint(output: Any) -> None:
    """Paint both fences of an output of :func:`fenced`."""
    for fence in _fences(output):
        fence.fill_(PAINT)


def broken(output: Any) -> str | None:
    """Where the fences of an output have other bytes than were painted, or None."""
    before, after = (fence != PAINT for fence in _fences(output))
    if after.any():
        return f"{int(after.sum())} bytes written past its end, the first {int(after.nonzero()[0])} bytes after it"
    if before.any():
        last = FENCE_BYTES - int(before.nonzero()[-1])
        return f"{int(before.sum())} bytes written before its start, the last {last} bytes before it"
    return None


def _fences(output: Any) -> tuple[Any, Any]:
    import torch

    memory = torch.empty(0, dtype=torch.uint8, device=output.device).set_(output.untyped_storage())
    return memory[:FENCE_BYTES], memory[-FENCE_BYTES:]
