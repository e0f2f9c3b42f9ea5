"""Configs of the grouped GEMMs: the grid, the default, and which of the grid cannot pay on a shape.

The grid is a list of the tiles that won on an H200, where 194 configs were timed on 13 layers of nine models: rows and
columns of a tile, warps, programs a multiprocessor. Left out, as no trial won with it: tiles of 256 rows, 8 warps on
fewer than 256 columns, three programs, bands of 4 or 32 row tiles, 2 stages where memory holds more.

:func:`estimate` is a roofline of a config's waste, in seconds of an H200; only ratios matter:

    volume   products that are computed, whole tiles and pieces: half a one is wasted in each group on average
    read     volume * (1 / BLOCK_SIZE_M + 1 / BLOCK_SIZE_N): what all tiles read, from L2
    seconds  max(volume / 665 T/s, read / 12.7 TB/s) + out / 4.3 TB/s

Measured on an H200, in FP8: no tile is faster than 1,333 TFLOP/s (M=131072 N=2048 K=7168 G=48); tiles of 64 x 256 reach
1,307 (M=32768 N=3072 K=5120 G=20), which reads 12.7 TB/s; a copy moves 4.3 TB/s.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from ..arches import ARCHES
from ..spec import DTYPE_FLAG, DTYPES, DeviceLimits, NamedInts

__all__ = ["AXES", "CONFIGS", "DEFAULT", "WITHOUT_FP8", "Work", "element_size", "estimate", "invalid"]

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (64, 128),
    "BLOCK_SIZE_N": (128, 256),
    "BLOCK_SIZE_K": (64, 128),
    "BAND": (8, 16),
    "DESCRIPTORS": (0, 1, 2),
    "PROGRAMS": (1, 2),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
"""DESCRIPTORS: 0 loads and stores by pointers, on any GPU; 1 loads operands by tensor descriptors, which Hopper's and
Blackwell's copy engine serves (TMA); 2 stores whole tiles by them too. PROGRAMS: of a multiprocessor."""

_TILES = (
    (64, 128, 4, 2),
    (64, 256, 4, 1),
    (128, 128, 4, 1),
    (128, 128, 4, 2),
    (128, 256, 8, 1),
)
"""Rows, columns, warps and programs a multiprocessor."""

CONFIGS = tuple(
    NamedInts(
        BLOCK_SIZE_M=rows,
        BLOCK_SIZE_N=columns,
        BLOCK_SIZE_K=depth,
        BAND=band,
        DESCRIPTORS=descriptors,
        PROGRAMS=programs,
        num_warps=warps,
        num_stages=stages,
    )
    for rows, columns, warps, programs in _TILES
    for depth in AXES["BLOCK_SIZE_K"]
    for band in AXES["BAND"]
    for descriptors in AXES["DESCRIPTORS"]
    for stages in AXES["num_stages"]
)
"""The grid."""

DEFAULT = NamedInts(
    BLOCK_SIZE_M=128,
    BLOCK_SIZE_N=128,
    BLOCK_SIZE_K=64,
    BAND=8,
    DESCRIPTORS=0,
    PROGRAMS=1,
    num_warps=8,
    num_stages=2,
)
"""What any GPU takes, and what is launched where the table has nothing."""

WITHOUT_FP8 = ("sm_80", "sm_86", "sm_87")
"""NVIDIA's arches for which Triton compiles no e4m3fn."""

MOST_SUMS = 128
"""Of a tile, in the registers of a thread."""

OTHER_REGISTERS = 40
"""Of a thread, beside its sums: addresses and loop counters, at least."""

WORSE = 1.15
"""Times the best estimate, beyond which a config is pruned. Of the 194 on 13 layers, none within 2 % of the best had
more than 1.08."""

COPIED_BYTES = 128
"""Of a row of a piece, the most that the copy engine swizzles. Where two programs share the memory, half may do."""

HELD_BYTES = 25 << 20
"""Half of the L2 of an H100 or H200."""

PRODUCTS_PER_S = 665e12
READ_BYTES_PER_S = 12.7e12
STORED_BYTES_PER_S = 4.3e12


class Work(NamedTuple):
    """What a kernel does on a shape, in the names of its tiles: ``groups`` products of ``down`` rows by ``across``
    columns, each a sum over ``depth``."""

    groups: int
    down: int
    across: int
    depth: int
    ragged: str
    """What differs from group to group, and is given as the sum over groups: ``down`` or ``depth``."""
    element_size: int
    """Bytes of an element of the operands."""


def element_size(shape: Mapping[str, int]) -> int:
    """Bytes of an element of the operands: of FP8, where a shape names no dtype."""
    return 2 if DTYPES[shape.get(DTYPE_FLAG, DTYPES.index("float8_e4m3fn"))] == "bfloat16" else 1


def invalid(config: Mapping[str, int], work: Work, limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    unfit = _unfit(config, work.element_size, limits)
    if unfit or config == DEFAULT:
        return unfit
    return _idle(config, work, limits) or _wasteful(NamedInts(config), work, limits)


def _unfit(config: Mapping[str, int], element_size: int, limits: DeviceLimits) -> str | None:
    """What of the device a config asks too much of."""
    if element_size == 1 and limits.arch in WITHOUT_FP8:
        return f"FP8: {limits.arch} has no tensor cores for it, and Triton compiles none"
    if config["DESCRIPTORS"] and not _has_descriptors(limits.arch):
        return f"DESCRIPTORS={config['DESCRIPTORS']}: {limits.arch} has no copy engine for tiles"
    threads = config["num_warps"] * limits.warp_size
    if threads > limits.max_threads_per_block:
        return f"{threads} threads a block, {limits.arch} has at most {limits.max_threads_per_block}"
    sums = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"] // threads
    if sums > MOST_SUMS:
        return f"{sums} sums a thread do not fit in registers beside what multiplies"
    programs = config["PROGRAMS"]
    if (sums + OTHER_REGISTERS) * threads * programs > limits.registers_per_block:
        return f"{programs} programs need more registers than a multiprocessor of {limits.arch} has"
    count = _shared_bytes(config, element_size, limits)
    if count > limits.shared_bytes_per_block:
        return f"{count} bytes of tiles, {limits.arch} has {limits.shared_bytes_per_block} of shared memory"
    return None


def _idle(config: Mapping[str, int], work: Work, limits: DeviceLimits) -> str | None:
    """What of the device or of the config has nothing to do."""
    if not config["DESCRIPTORS"] and _has_descriptors(limits.arch):
        return f"DESCRIPTORS=0: the copy engine of {limits.arch} idles"
    stages = config["num_stages"]
    deeper = {**config, "num_stages": stages + 1}
    if stages < AXES["num_stages"][-1] and config["DESCRIPTORS"] and not _unfit(deeper, work.element_size, limits):
        return f"num_stages={stages}: shared memory holds {stages + 1}"
    deep, depth = config["BLOCK_SIZE_K"], _of_group(work, "depth")
    if deep * work.element_size < COPIED_BYTES and config["DESCRIPTORS"] and config["PROGRAMS"] == 1:
        return f"pieces of {deep * work.element_size} bytes a row: descriptors copy {COPIED_BYTES} at a time"
    if deep >= 2 * depth:
        return f"pieces of {deep} for a depth of {depth}: half of each is outside"
    return _same_order(config, work)


def _same_order(config: Mapping[str, int], work: Work) -> str | None:
    """Whether a shorter band orders the tiles of a group alike, or no order matters."""
    band, down = config["BAND"], _of_group(work, "down")
    shorter = max((each for each in AXES["BAND"] if each < band), default=0)
    if not shorter:
        return None
    tiles = -(-down // config["BLOCK_SIZE_M"])
    if tiles <= shorter:
        return f"BAND={band}: a group has {tiles} row tiles, in the order of BAND={shorter}"
    count = (down + work.across) * _of_group(work, "depth") * work.element_size
    if count <= HELD_BYTES:
        return f"BAND={band}: L2 holds the {count:,} bytes of a group in any order"
    return None


def _of_group(work: Work, name: str) -> int:
    """A size of a group; the mean of one that differs."""
    size: int = getattr(work, name)
    return max(1, size // work.groups) if work.ragged == name else size


def _wasteful(config: NamedInts, work: Work, limits: DeviceLimits) -> str | None:
    """Whether another config is estimated to take much less time."""
    ratio = estimate(config, work) / _least(work, limits)
    return f"its tiles take {ratio:.2f} times the best estimate: reads and waste" if ratio > WORSE else None


@functools.lru_cache(maxsize=1024)
def _least(work: Work, limits: DeviceLimits) -> float:
    """The best estimate of the grid."""
    fit = [config for config in CONFIGS if _unfit(config, work.element_size, limits) is None]
    return min(estimate(config, work) for config in fit or [DEFAULT])


def estimate(config: Mapping[str, int], work: Work) -> float:
    """Seconds, as the module says."""
    down, across, deep = (config[f"BLOCK_SIZE_{dim}"] for dim in "MNK")
    sizes = {"down": (work.down, down), "across": (work.across, across), "depth": (work.depth, deep)}
    volume = 1  # a sum over groups is one of the sizes: the others are not multiplied by them
    for name, (size, block) in sizes.items():
        if name == work.ragged:
            volume *= max(size + work.groups * block // 2, work.groups * block)
        else:
            volume *= -(-size // block) * block
    read = volume * (1 / down + 1 / across) * work.element_size
    stored = 2 * work.down * work.across * (1 if work.ragged == "down" else work.groups)
    products = volume * work.element_size  # bfloat16 runs at half the rate
    return max(products / PRODUCTS_PER_S, read / READ_BYTES_PER_S) + stored / STORED_BYTES_PER_S


def _shared_bytes(config: Mapping[str, int], element_size: int, limits: DeviceLimits) -> int:
    """Of a multiprocessor: stages of both operands, and the tile that is stored by a descriptor. On AMD the last stage
    is in registers."""
    down, across, deep = (config[f"BLOCK_SIZE_{dim}"] for dim in "MNK")
    stages = config["num_stages"] - (0 if limits.warp_size == 32 else 1)
    staged = (down + across) * deep * element_size * stages
    stored = 2 * down * across if config["DESCRIPTORS"] == 2 else 0
    return (staged + stored) * config["PROGRAMS"]


def _has_descriptors(arch: str) -> bool:
    """Whether tensor descriptors are served by hardware."""
    return ARCHES[arch].backend == "cuda" and int(arch.removeprefix("sm_")) >= 90 if arch in ARCHES else False
