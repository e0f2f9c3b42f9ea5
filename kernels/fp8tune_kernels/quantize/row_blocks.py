"""Quantize rows, and write the codes also transposed, in one read: the kernels of the folded recipe but one.

A row's scale needs all of its columns, and stores along the rows need 16 rows or more to be wide: so many whole rows
seldom fit into registers. Rows fall into groups. A *block* is BLOCK_SIZE_M rows of a group, counted from its first row;
a *tile* is BLOCK_SIZE_K columns of a block. Two forms, chosen by the axis ``HELD``:

*Held* (1): all programs draw tiles from a counter, block after block. A program takes the maxima of its tile's rows
into the block's, in memory, and holds the tile until all tiles of the block have done so: shortly, as they were drawn
one after the other. Then it casts what it holds. Each value is read once.

*Walking twice* (0): a program walks the tiles of a block twice, for the maxima and for the cast. The first tile stays
in registers, so that rows no longer than a tile are read once. Others are read again, from L2 if it still has them.

A program that holds a tile asks TRIES times whether the block is complete. Then it leaves the tile for later, when
there are no more to draw, and reads it again. So whoever may still have to draw a tile waits for nobody without an end,
and what is waited for later is at work. No launch needs to be cooperative: it ends with however few programs a GPU runs
at once, beside whatever other kernels, and in an interpreter that runs one program after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8tune_kernels.quantize.arithmetic import magnitude, magnitude_to_float32, quantize, scale_of
from fp8tune_kernels.quantize.factors import reciprocal
from fp8tune_kernels.quantize.limits import idle_columns, too_many_shared_bytes, values_a_thread, wrong_tile
from fp8tune_kernels.quantize.tiles import of_any_layout
from fp8tune_kernels.spec import DeviceLimits

__all__ = [
    "AXES",
    "Block",
    "BlockOptions",
    "Groups",
    "Rows",
    "block_of",
    "groups_constant",
    "groups_of",
    "invalid",
    "load",
    "most_blocks",
    "programs",
    "quantize_blocks",
    "store_transposed",
    "work_for",
]

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (32, 64, 128),
    "BLOCK_SIZE_K": (64, 128, 256, 512),
    "HELD": (0, 1),
    "num_warps": (2, 4, 8, 16),
    "num_stages": (1, 2),
    "maxnreg": (0, 128),
}

TRIES = tl.constexpr(64)
"""How often a program asks whether a block is complete: each time is a way to L2 and back, 0.7 us on an H100."""

PROGRAMS_PER_MULTIPROCESSOR = 16
"""More than an SM runs at once: who comes late finds nothing left to draw, and takes no time."""

LEAST_GROUPS_CONSTANT = 256
"""Of fewer groups the vectors of ends are no faster, and each length has a binary of its own."""


class Rows(NamedTuple):
    """A matrix whose rows fall into groups, and where its codes go."""

    x_ptr: tl.tensor  # (M, K), row-major
    offs_ptr: tl.tensor  # (G,): the end row of each group; None: G groups of ``stride`` rows
    q_ptr: tl.tensor  # (M, K), row-major
    scales_ptr: tl.tensor  # (M,)
    transposed_ptr: tl.tensor  # row m of column k of a group: its first place + k * stride + m; None: not written
    column_scales_ptr: tl.tensor  # (G, K): what columns are divided by before all else; None: by nothing
    row_scales_ptr: tl.tensor  # (M,): what rows are divided by for the maxima of columns; None: there are none
    column_amax_ptr: tl.tensor  # (G, K), int32: magnitudes as bits, that begin as zeros
    M: tl.tensor
    K: tl.tensor
    G: tl.tensor
    stride: tl.tensor  # from a column of the transposed codes to the next
    ALIGNMENT: tl.constexpr  # of the groups in them; 0: equal groups, each transposed for itself, or none written


class BlockOptions(NamedTuple):
    """What a binary is compiled for."""

    FP8_MAX: tl.constexpr
    POWER_OF_TWO: tl.constexpr
    GROUPS: tl.constexpr  # a power of two above G
    BLOCK_SIZE_M: tl.constexpr
    BLOCK_SIZE_K: tl.constexpr


class Groups(NamedTuple):
    """A vector of each value over all groups; group G stands for the rows past the last one."""

    start: tl.tensor  # rows of x
    end: tl.tensor
    place: tl.tensor  # where its transposed codes begin
    last: tl.tensor  # the number of blocks up to its last


class Block(NamedTuple):
    """BLOCK_SIZE_M rows of a group."""

    group: tl.tensor
    first: tl.tensor  # row of x
    left: tl.tensor  # rows of x from the first on
    place: tl.tensor  # where the group's transposed codes begin
    row: tl.tensor  # rows of the group before
    room: tl.tensor  # rows of its transposed codes from there on


@triton.jit
def quantize_blocks(
    rows: Rows, work_ptr: tl.tensor, most: tl.tensor, options: BlockOptions, HELD: tl.constexpr, STAGES: tl.constexpr
) -> None:
    """What one of :func:`programs` does. ``work_ptr``: what :func:`work_for` gave for ``most`` blocks."""
    if HELD:
        _hold_tiles(rows, work_ptr, most, options)
    else:
        _walk_twice(rows, options, STAGES)


@triton.jit
def _hold_tiles(rows: Rows, work_ptr: tl.tensor, most: tl.tensor, options: BlockOptions) -> None:
    """Tiles until there are none to draw, then those that were left for later. The next one is drawn as a turn begins,
    so that its way to L2 and back costs nothing."""
    across = tl.maximum(tl.cdiv(rows.K, options.BLOCK_SIZE_K), 1)  # without a column, rows have scales all the same
    groups = groups_of(rows, options)
    tiles = tl.max(groups.last, 0) * across
    done_ptr = work_ptr + 1
    amax_ptr = done_ptr + most
    late_ptr = amax_ptr + rows.M
    lanes = tl.arange(0, options.BLOCK_SIZE_M)
    late = tl.full([], 0, tl.int32)  # one more than the last tile that was left; each has the one before in memory

    ticket = tl.atomic_add(work_ptr, 1, sem="relaxed")
    while (ticket < tiles) | (late > 0):
        following = tl.atomic_add(work_ptr, 1, sem="relaxed")
        is_new = ticket < tiles
        drawn = tl.where(is_new, ticket, late - 1)
        number = drawn // across
        block = block_of(rows, groups, number, options)
        columns = drawn % across * options.BLOCK_SIZE_K + tl.arange(0, options.BLOCK_SIZE_K)
        x = load(rows, block, columns, options)
        inside = lanes < block.left
        complete = tl.full([], 0, tl.int32)
        if is_new:
            largest = _maxima(rows, block, columns, x, options)
            tl.atomic_max(amax_ptr + block.first + lanes, largest, mask=inside, sem="relaxed")
            tl.debug_barrier()  # all threads' maxima before the one count that publishes them
            complete = tl.atomic_add(done_ptr + number, 1, sem="acq_rel") + 1
        else:
            late = tl.load(late_ptr + drawn, cache_modifier=".cg")
        tries = 0
        while (complete < across) & ((tries < TRIES) | (ticket >= tiles)):
            complete = tl.atomic_add(done_ptr + number, 0, sem="acquire")
            tries += 1
        if complete >= across:
            bits = tl.load(amax_ptr + block.first + lanes, mask=inside, other=0, cache_modifier=".cg")
            _cast(rows, block, columns, x, bits, options)
        else:
            tl.store(late_ptr + drawn, late)
            tl.debug_barrier()  # one thread stores what all will load
            late = drawn + 1
        ticket = following


@triton.jit
def _walk_twice(rows: Rows, options: BlockOptions, STAGES: tl.constexpr) -> None:
    """Block after block, each with its tiles twice; the second time backwards, so that those read last are found in
    the cache."""
    groups = groups_of(rows, options)
    tiles = tl.cdiv(rows.K, options.BLOCK_SIZE_K)
    lanes = tl.arange(0, options.BLOCK_SIZE_K)
    for number in tl.range(tl.program_id(0), tl.max(groups.last, 0), tl.num_programs(0), num_stages=1):
        block = block_of(rows, groups, number, options)
        kept = load(rows, block, lanes, options)
        largest = _maxima(rows, block, lanes, kept, options)
        for tile in tl.range(1, tiles, num_stages=STAGES):
            columns = tile * options.BLOCK_SIZE_K + lanes
            x = load(rows, block, columns, options)
            largest = tl.maximum(largest, _maxima(rows, block, columns, x, options))
        _cast(rows, block, lanes, kept, largest, options)
        for tile in tl.range(1, tiles, num_stages=STAGES):
            columns = (tiles - tile) * options.BLOCK_SIZE_K + lanes
            x = load(rows, block, columns, options)
            _cast(rows, block, columns, x, largest, options)


@triton.jit
def groups_of(rows: Rows, options: BlockOptions) -> Groups:
    """Rows, places and blocks of all groups: two scans, once a program."""
    group = tl.arange(0, options.GROUPS)
    if rows.offs_ptr is None:
        start = tl.minimum(group, rows.G) * rows.stride
        end = tl.minimum(group + 1, rows.G) * rows.stride
    else:
        end = tl.load(rows.offs_ptr + group, mask=group < rows.G, other=rows.M)
        start = tl.load(rows.offs_ptr + group - 1, mask=(group > 0) & (group <= rows.G), other=0)
        start = tl.where(group <= rows.G, start, rows.M)
    taken = _taken(rows, group, start, end)
    place = start
    if rows.ALIGNMENT > 0:
        place = tl.cumsum(taken, 0) - taken
    return Groups(start, end, place, tl.cumsum(tl.cdiv(taken, options.BLOCK_SIZE_M), 0))


@triton.jit
def _taken(rows: Rows, group: tl.tensor, start: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Rows that have codes of any kind: those of a group, with the rows of zeros that follow where it is aligned."""
    size = end - start
    if rows.ALIGNMENT > 0:
        padded = tl.maximum(tl.cdiv(size, rows.ALIGNMENT), 1) * rows.ALIGNMENT
        return tl.where(group < rows.G, padded, size)
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        return size


@triton.jit
def block_of(rows: Rows, groups: Groups, number: tl.tensor, options: BlockOptions) -> Block:
    """A block by its number."""
    group = tl.sum((groups.last <= number).to(tl.int32), 0)
    is_mine = tl.arange(0, options.GROUPS) == group
    start, end = _one_of(groups.start, is_mine), _one_of(groups.end, is_mine)
    taken = _taken(rows, group, start, end)
    in_group = number - (_one_of(groups.last, is_mine) - tl.cdiv(taken, options.BLOCK_SIZE_M))
    row = in_group * options.BLOCK_SIZE_M
    if rows.offs_ptr is None:  # noqa: SIM108 - one of both is compiled
        room = rows.stride - row  # of which the compiler may know that it is a multiple of 16
    else:
        room = tl.where(group < rows.G, taken - row, 0)
    return Block(group, start + row, end - start - row, _one_of(groups.place, is_mine), row, room)


@triton.jit
def _one_of(values: tl.tensor, is_mine: tl.tensor) -> tl.tensor:
    """The element of a vector where a mask is set, which is so once."""
    return tl.sum(tl.where(is_mine, values, 0), 0)


@triton.jit
def load(rows: Rows, block: Block, columns: tl.tensor, options: BlockOptions) -> tl.tensor:
    """The values of a tile, zero outside of the group's rows and of K columns."""
    lanes = tl.arange(0, options.BLOCK_SIZE_M)
    at = rows.x_ptr + block.first.to(tl.int64) * rows.K + (lanes[:, None] * rows.K + columns[None, :])
    inside = (lanes < block.left)[:, None] & (columns < rows.K)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _values(rows: Rows, block: Block, columns: tl.tensor, x: tl.tensor) -> tl.tensor:
    """What is cast: the values of a tile, or these over the scales of the columns."""
    if rows.column_scales_ptr is None:
        return x
    else:  # noqa: RET505
        at = rows.column_scales_ptr + block.group.to(tl.int64) * rows.K + columns
        inside = columns < tl.where(block.group < rows.G, rows.K, 0)
        return x.to(tl.float32) * reciprocal(tl.load(at, mask=inside, other=1.0))[None, :]


@triton.jit
def _maxima(rows: Rows, block: Block, columns: tl.tensor, x: tl.tensor, options: BlockOptions) -> tl.tensor:
    """The maxima of a tile's rows, as bits; those of its columns, if they are asked for, are taken into memory."""
    if rows.row_scales_ptr is not None:
        lanes = tl.arange(0, options.BLOCK_SIZE_M)
        scale = tl.load(rows.row_scales_ptr + block.first + lanes, mask=lanes < block.left, other=1.0)
        largest = tl.max(magnitude(x.to(tl.float32) * reciprocal(scale)[:, None]), 0)
        inside = columns < tl.where(block.group < rows.G, rows.K, 0)
        at = rows.column_amax_ptr + block.group.to(tl.int64) * rows.K + columns
        tl.atomic_max(at, largest, mask=inside, sem="relaxed")
    return tl.max(magnitude(_values(rows, block, columns, x)), 1).to(tl.int32)


@triton.jit
def _cast(rows: Rows, block: Block, columns: tl.tensor, x: tl.tensor, bits: tl.tensor, options: BlockOptions) -> None:
    """A tile by the maxima of its rows, both ways. Transposed first and by scales of any layout: the two casts would
    else be one, in the layout of the load, and codes were transposed byte by byte, with 239 registers a thread for 163
    at 64 x 128 in 4 warps."""
    lanes = tl.arange(0, options.BLOCK_SIZE_M)
    inside = lanes < block.left
    dtype: tl.constexpr = rows.x_ptr.dtype.element_ty if rows.column_scales_ptr is None else tl.float32
    scale = scale_of(magnitude_to_float32(bits, dtype), options.FP8_MAX, options.POWER_OF_TWO)
    tl.store(rows.scales_ptr + block.first + lanes, scale, mask=inside & (tl.min(columns, 0) == 0))
    if rows.transposed_ptr is not None:  # noqa: SIM102 - one is a matter of the binary, the other of its run
        if block.room > 0:  # a branch of its own, so that the two casts share nothing
            y = _values(rows, block, columns, x)
            q = quantize(y, of_any_layout(scale)[:, None], rows.q_ptr.dtype.element_ty, options.FP8_MAX)
            store_transposed(rows, block, columns, q, options)
    y = _values(rows, block, columns, x)
    q = quantize(y, scale[:, None], rows.q_ptr.dtype.element_ty, options.FP8_MAX)
    at = rows.q_ptr + block.first.to(tl.int64) * rows.K + (lanes[:, None] * rows.K + columns[None, :])
    tl.store(at, q, mask=inside[:, None] & (columns < rows.K)[None, :], eviction_policy="evict_first")


@triton.jit
def store_transposed(rows: Rows, block: Block, columns: tl.tensor, q: tl.tensor, options: BlockOptions) -> None:
    """Along the rows: where groups are aligned, in chunks of 16 that are whole."""
    lanes = tl.arange(0, options.BLOCK_SIZE_M)
    if rows.ALIGNMENT > 0:
        first = rows.transposed_ptr + (block.place + block.row) // 16 * 16  # so that the compiler knows it
        within = lanes // 16 * 16 < block.room
        at = first + columns.to(tl.int64)[None, :] * (rows.stride // 16 * 16) + lanes[:, None]
    else:
        first = rows.transposed_ptr + block.group.to(tl.int64) * rows.stride * rows.K + block.row
        within = lanes < block.room
        at = first + columns.to(tl.int64)[None, :] * rows.stride + lanes[:, None]
    tl.store(at, q, mask=within[:, None] & (columns < rows.K)[None, :], eviction_policy="evict_first")


def groups_constant(groups: int) -> int:
    """GROUPS of a launch: a power of two above the number of groups."""
    return max(LEAST_GROUPS_CONSTANT, 1 << groups.bit_length())


def most_blocks(config: Mapping[str, int], rows: int, groups: int) -> int:
    """Blocks that there can be at most; ``rows``: those of all codes, the rows between groups among them."""
    return -(-rows // config["BLOCK_SIZE_M"]) + groups + 1


def programs(config: Mapping[str, int], rows: int, columns: int, groups: int, device: torch.device) -> int:
    """Programs to launch: as many as a GPU runs at once, but no more than there are tiles, or blocks to walk."""
    work = most_blocks(config, rows, groups)
    if config["HELD"]:
        work *= max(-(-columns // config["BLOCK_SIZE_K"]), 1)
    return min(work, PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(device))


def work_for(config: Mapping[str, int], rows: int, columns: int, blocks: int, unused: torch.Tensor) -> torch.Tensor:
    """The zeros to count in: the tickets, finished tiles of every block, maxima of every row, tiles left for later.

    Walking twice needs none: ``unused``, any tensor of the launch, stands in for them.
    """
    if not config["HELD"]:
        return unused
    tiles = blocks * max(-(-columns // config["BLOCK_SIZE_K"]), 1)
    return torch.zeros(1 + blocks + rows + tiles, dtype=torch.int32, device=unused.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """SMs or CUs. On a CPU any number does; of meta tensors, which are compiled for, many: they fill any GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4 if device.type == "cpu" else 512


def invalid(config: Mapping[str, int], rows: int, columns: int, limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay on rows of so many columns, or None; ``rows``: of a group."""
    tile, stages = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_K"], config["num_stages"]
    values = values_a_thread(config, tile, limits)
    if config["HELD"] and stages > 1:
        return "same as num_stages=1: a tile is read once, without a loop"
    if config["maxnreg"]:
        if limits.arch.startswith("gfx"):
            return "maxnreg is an option of NVIDIA's compiler"
        if values != 64:
            return f"maxnreg={config['maxnreg']} with {values} values a thread: more spills, or no program more"
    if config["HELD"] and values < 32:
        return f"{values} values a thread: too few loads under way to hide the wait for a tile"
    if config["BLOCK_SIZE_M"] >= 2 * rows:
        return f"{config['BLOCK_SIZE_M']} rows a block for {rows}: half of the threads idle"
    staged = 2 * tile * (1 + stages if stages > 1 else 1)
    return (
        wrong_tile(config, tile, limits, held="the tile and its codes do")
        or too_many_shared_bytes(staged, "of tiles in flight and to transpose", limits)
        or idle_columns(config["BLOCK_SIZE_K"], columns)
    )
