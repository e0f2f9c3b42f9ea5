"""Kernels whose programs have whole rows in registers: how many at a time, and what their stages of loads need."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from ..arches import ARCHES
from ..runtime.lookup import running_arch

EXCHANGED_BYTES = 128
"""Of sums and maxima across the warps of a block: at most 32 warps, 4 bytes each."""


def tile_of(config: Mapping[str, int], N: int) -> tuple[int, bool, int]:
    """Return what a program casts at a time: columns of the first tile, whether half as many follow, and rows: as many
    as TILE elements hold. So no more than a third of the lanes have no column, and most often fewer."""
    power = max(1 << max(N - 1, 0).bit_length(), 32)
    has_rest = power >= max(4 * N / 3, 64)
    return power // 2 if has_rest else power, has_rest, min(max(config["TILE"] // power, 1), config["BLOCK_SIZE_M"])


def shared_bytes(config: Mapping[str, int], N: int, matrices: int) -> int:
    """Shared memory of a block on NVIDIA: tiles of bfloat16 of so many matrices (M, N), asked for while others are
    cast, and what threads tell each other. AMD's back end keeps them in registers."""
    width, has_rest, rows = tile_of(config, N)
    elements = (width + width // 2 * has_rest) * rows
    return (config["num_stages"] - 1) * 2 * matrices * elements + EXCHANGED_BYTES


def options(config: Mapping[str, int], N: int, matrices: int, device: torch.device) -> dict[str, int]:
    """Return the launch options of a config. One that was measured on shorter rows may ask for more shared memory than
    a block has: it is launched with one stage, and not timed (the ``invalid`` of its spec)."""
    launched = {name: value for name, value in config.items() if name != "TILE"}
    if launched["num_stages"] > 1 and shared_bytes(config, N, matrices) > _room(device):
        launched["num_stages"] = 1
    return launched


def _room(device: torch.device) -> int:
    """Bytes of shared memory that a block may have on a device; no limit where stages need none."""
    arch = ARCHES.get(running_arch(device))
    return arch.shared_bytes_per_block if arch and arch.backend == "cuda" else sys.maxsize
