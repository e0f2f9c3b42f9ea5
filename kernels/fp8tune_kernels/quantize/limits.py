"""The hardware reasons why a config cannot pay, as the ``invalid`` of several kernels says them; None where it may."""

from __future__ import annotations

from collections.abc import Mapping

from ..spec import DeviceLimits

MOST_VALUES = 128
"""Of a tile, in the registers of a thread."""


def values_a_thread(config: Mapping[str, int], elements: int, limits: DeviceLimits) -> int:
    """Return the elements of a tile that a thread has."""
    return elements // (config["num_warps"] * limits.warp_size)


def wrong_tile(
    config: Mapping[str, int],
    elements: int,
    limits: DeviceLimits,
    *,
    least: int = 16,
    too_few: str = "too few for one 16-byte store of FP8",
    held: str = "the tile does",
) -> str | None:
    """A block has too many threads, or a thread fewer than ``least`` or more than :data:`MOST_VALUES` elements."""
    threads = config["num_warps"] * limits.warp_size
    values = values_a_thread(config, elements, limits)
    if threads > limits.max_threads_per_block:
        return f"{threads} threads a block, {limits.arch} has at most {limits.max_threads_per_block}"
    if values < least:
        return f"{values} values a thread: {too_few}"
    if values > MOST_VALUES:
        return f"{values} values a thread: {held} not fit in registers"
    return None


def too_many_shared_bytes(count: int, purpose: str, limits: DeviceLimits) -> str | None:
    """A block cannot have so much shared memory."""
    room = limits.shared_bytes_per_block
    return f"{count} bytes {purpose}, {limits.arch} has {room} of shared memory a block" if count > room else None


def idle_columns(block: int, columns: int, tile: str = "block") -> str | None:
    """At least half of a tile's columns would be outside of the matrix."""
    return f"{block} columns a {tile} for {columns}: half of the threads idle" if block >= 2 * columns else None
