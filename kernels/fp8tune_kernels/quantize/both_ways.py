"""Quantize groups of rows row by row and column by column in one read: rowwise-colwise and colwise-transpose-3d.

A row's scale needs all of its columns and a column's all rows of its group, so that nothing of a group can be cast
before all of it was read. It is read twice, as in :mod:`.panels`, but once from memory where L2 holds a
group: then 4 bytes move for an element of bfloat16, where two kernels move 6.

A *piece* is a tile of BLOCK_SIZE columns and BLOCK_SIZE_ITER rows of a group; pieces are numbered across the columns,
then down the rows. All programs draw *turns* from a counter. In turn t a program takes one piece into the maxima of its
rows and columns, and casts both ways another, whose group is complete or about to be:

    begin[g + 1] = begin[g] + pieces[g] + max(0, pieces[g] - pieces[g + 1])
    turn of a piece's maxima  = begin[g] + its number
    turn of its cast          = begin[g] + pieces[g] + LEAD + its number

So the casts of a group begin LEAD turns after the last of its maxima, end before those of the next group begin, and no
maxima run further ahead than they must: what is live in L2 is the larger of two neighbours, never the largest group of
all. Turns between two groups that differ in length have one half to do.

A cast waits for the maxima of its group, which are of lower turns, and each program's own are published before it
waits. The least turn that is not done waits for nobody: no launch needs to be cooperative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..spec import DeviceLimits
from . import panels
from .arithmetic import magnitude, magnitude_to_float32, quantize, scale_of
from .limits import idle_columns, too_many_shared_bytes, values_a_thread, wrong_tile
from .panels import _pieces_of
from .tiles import (
    Matrix,
    Options,
    Tile,
    clear_gap,
    first_row,
    fold,
    folded_rows,
    group_end,
    group_start,
    load_tile,
    of_any_layout,
    q_of_group,
    store_edges,
    store_tile,
    top,
    units_of,
)

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE": (64, 128, 256),
    "BLOCK_SIZE_ITER": (64, 128, 256),
    "LEAD": (192, 512),
    "num_warps": (2, 4, 8),
    "num_stages": (1,),
    "maxnreg": (0, 128, 168),
}
"""``maxnreg``: registers a thread may have, 0 for as many as the compiler likes; NVIDIA's alone. With 64 values a
thread it likes about 230, and two programs of 4 warps run on an SM at once; 168 make it three without a spill, 128 four
for some 60 bytes of spills."""


class _Cursor(NamedTuple):
    """A group of rows that a program is at."""

    group: tl.tensor
    begin: tl.tensor  # the turn that its maxima begin in
    start: tl.tensor
    end: tl.tensor
    units: tl.tensor  # of the groups before it, where groups are aligned


@triton.jit
def quantize_both_ways(
    matrix: Matrix, q_rows_ptr: tl.tensor, row_scales_ptr: tl.tensor, work_ptr: tl.tensor, options: Options
) -> None:
    """Turns until there are none left. Both tiles of a turn are asked for at once, so that one wait serves two.

    Rows past the last group are quantized row by row like any other; column by column they become zeros, or nothing
    where groups are aligned. ``q_rows_ptr`` is (M, K), row-major, ``row_scales_ptr`` (M,), and ``work_ptr`` what
    :func:`work_for` gave.
    """
    across = tl.maximum(tl.cdiv(matrix.K, options.BLOCK_SIZE), 1)  # without a column, rows have scales all the same
    done_ptr = work_ptr + 1
    amax_ptr = done_ptr + matrix.G + 1
    row_amax_ptr = amax_ptr + matrix.G * matrix.K
    turns = _turns(matrix, across, options.BLOCK_SIZE_ITER) + options.LEAD
    rows = tl.arange(0, options.BLOCK_SIZE_ITER)
    lanes = tl.arange(0, options.BLOCK_SIZE)
    zero = tl.full([], 0, tl.int32)
    new = _Cursor(zero, zero, zero, group_end(matrix, zero), zero)
    old = new

    turn = tl.atomic_add(work_ptr, 1, sem="relaxed")
    while turn < turns:
        new = _advance(matrix, turn, 1, new, across, options.BLOCK_SIZE_ITER)
        first, new_panel, is_new = _locate(matrix, turn - new.begin, new, across, options.BLOCK_SIZE_ITER)
        new_tile = Tile(first, rows, new_panel * options.BLOCK_SIZE + lanes, new.start, new.end)
        new_x = load_tile(matrix, new_tile, tl.where(is_new, new.end, new.start), "evict_last")

        late = turn - options.LEAD
        old = _advance(matrix, late, 2, old, across, options.BLOCK_SIZE_ITER)
        in_group = _blocks_of_rows(matrix, old.group, old.start, old.end, options.BLOCK_SIZE_ITER) * across
        turn_of_group = late - old.begin - in_group
        first, old_panel, is_old = _locate(matrix, turn_of_group, old, across, options.BLOCK_SIZE_ITER)
        old_tile = Tile(first, rows, old_panel * options.BLOCK_SIZE + lanes, old.start, old.end)
        old_x = load_tile(matrix, old_tile, tl.where(is_old, old.end, old.start), "evict_first")

        if is_new:
            first, columns = new_tile.first, new_tile.columns
            of_rows = tl.max(magnitude(new_x), 1)
            inside = (rows >= new.start - first) & (rows < new.end - first)
            tl.atomic_max(row_amax_ptr + first + rows, of_rows, mask=inside, sem="relaxed")
            largest = top(fold(new_x, folded_rows(options.BLOCK_SIZE_ITER, options.BLOCK_SIZE, options.num_warps)))
            inside = columns < tl.where(new.group < matrix.G, matrix.K, 0)
            tl.atomic_max(amax_ptr + new.group * matrix.K + columns, largest, mask=inside, sem="relaxed")
            tl.debug_barrier()  # all threads' maxima before the one count that publishes them
            tl.atomic_add(done_ptr + new.group, 1, sem="release")
        if is_old:
            while tl.atomic_add(done_ptr + old.group, 0, sem="acquire") < in_group:
                pass
            columns = old_tile.columns
            inside = columns < tl.where(old.group < matrix.G, matrix.K, 0)
            bits = tl.load(amax_ptr + old.group * matrix.K + columns, mask=inside, other=0, cache_modifier=".cg")
            amax = magnitude_to_float32(bits, matrix.x_ptr.dtype.element_ty)
            scale = scale_of(amax, options.FP8_MAX, options.POWER_OF_TWO)
            inside &= old_tile.first == first_row(matrix, old.start)
            tl.store(matrix.scales_ptr + old.group.to(tl.int64) * matrix.K + columns, scale, mask=inside)
            scale = of_any_layout(scale)
            q_ptr = q_of_group(matrix, old.group, old.units)
            if old.group < matrix.G:  # a branch, as no scale makes a zero of what padding rows may hold
                q = quantize(old_x, scale[None, :], q_ptr.dtype.element_ty, options.FP8_MAX)
                store_tile(matrix, q_ptr, old_tile, q, "evict_first")
            elif matrix.ALIGNMENT == 1:
                zeros = tl.zeros((options.BLOCK_SIZE_ITER, options.BLOCK_SIZE), tl.uint8)
                store_tile(matrix, q_ptr, old_tile, zeros.to(q_ptr.dtype.element_ty, bitcast=True), "evict_first")
            _cast_rows(old_x, matrix, q_rows_ptr, row_scales_ptr, row_amax_ptr, old_tile, old_panel == 0, options)
            if matrix.ALIGNMENT == 1:
                last = old_tile.first + options.BLOCK_SIZE_ITER
                read_end = tl.where(old.group < matrix.G, old.end, old.start)
                store_edges(matrix, q_ptr, old_tile, last, read_end, scale, options.FP8_MAX)
            elif old.group < matrix.G:
                clear_gap(matrix, q_ptr, old_tile, old_tile.first + options.BLOCK_SIZE_ITER, scale)
        turn = tl.atomic_add(work_ptr, 1, sem="relaxed")


@triton.jit
def _cast_rows(
    x: tl.tensor,
    matrix: Matrix,
    q_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    tile: Tile,
    writes_scales: tl.tensor,
    options: Options,
) -> None:
    """A tile by the maxima of its rows. After the cast of its columns: it would else share that one's conversion to
    float32, which ties both to the layout of the load, and codes were transposed byte by byte."""
    first, rows, columns, start, end = tile
    inside = (rows >= start - first) & (rows < end - first)
    bits = tl.load(amax_ptr + first + rows, mask=inside, other=0, cache_modifier=".cg")
    amax = magnitude_to_float32(bits, matrix.x_ptr.dtype.element_ty)
    scale = scale_of(amax, options.FP8_MAX, options.POWER_OF_TWO)
    tl.store(scales_ptr + first + rows, scale, mask=inside & writes_scales)
    q = quantize(x, scale[:, None], q_ptr.dtype.element_ty, options.FP8_MAX)
    at = q_ptr + first.to(tl.int64) * matrix.K + (rows[:, None] * matrix.K + columns[None, :])
    tl.store(at, q, mask=inside[:, None] & (columns < matrix.K)[None, :], eviction_policy="evict_first")


@triton.jit
def _blocks_of_rows(
    matrix: Matrix, group: tl.tensor, start: tl.tensor, end: tl.tensor, BLOCK_SIZE_ITER: tl.constexpr
) -> tl.tensor:
    """Blocks of BLOCK_SIZE_ITER rows of a group, at least one. The padding rows have row-wise codes, aligned or not."""
    blocks = _pieces_of(matrix, group, start, end, BLOCK_SIZE_ITER)
    if matrix.ALIGNMENT == 1:
        return blocks
    else:  # noqa: RET505
        return tl.where(group < matrix.G, blocks, tl.maximum(tl.cdiv(end - start, BLOCK_SIZE_ITER), 1))


@triton.jit
def _turns(matrix: Matrix, across: tl.tensor, BLOCK_SIZE_ITER: tl.constexpr) -> tl.tensor:
    """Turns until the casts of the last group end, but for LEAD; the padding rows count as a group."""
    total = 0
    for group in tl.range(0, matrix.G + 1, 128, num_stages=1):
        groups = group + tl.arange(0, 128)
        starts, ends = group_start(matrix, groups), group_end(matrix, groups)
        blocks = _blocks_of_rows(matrix, groups, starts, ends, BLOCK_SIZE_ITER)
        following = _blocks_of_rows(matrix, groups + 1, ends, group_end(matrix, groups + 1), BLOCK_SIZE_ITER)
        blocks += tl.maximum(blocks - tl.where(groups < matrix.G, following, 0), 0)
        total += tl.sum(tl.where(groups <= matrix.G, blocks, 0))
    return total * across


@triton.jit
def _advance(
    matrix: Matrix,
    turn: tl.tensor,
    READS: tl.constexpr,
    at: _Cursor,
    across: tl.tensor,
    BLOCK_SIZE_ITER: tl.constexpr,
) -> _Cursor:
    """Move a cursor on from groups that were read READS times before a turn; no further than the padding rows."""
    group, begin, start, end, units = at
    pieces = _blocks_of_rows(matrix, group, start, end, BLOCK_SIZE_ITER) * across
    while (turn >= begin + READS * pieces) & (group < matrix.G):
        begin += pieces
        if matrix.ALIGNMENT > 1:
            units += units_of(matrix, start, end)
        group += 1
        start = end
        end = group_end(matrix, group)
        longer = pieces
        pieces = _blocks_of_rows(matrix, group, start, end, BLOCK_SIZE_ITER) * across
        begin += tl.maximum(longer - pieces, 0)
    return _Cursor(group, begin, start, end, units)


@triton.jit
def _locate(
    matrix: Matrix, piece: tl.tensor, at: _Cursor, across: tl.tensor, BLOCK_SIZE_ITER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A piece of a group -> its first row, its block of columns, and whether the group has such a piece."""
    exists = (piece >= 0) & (piece < _blocks_of_rows(matrix, at.group, at.start, at.end, BLOCK_SIZE_ITER) * across)
    piece = tl.where(exists, piece, 0)
    return first_row(matrix, at.start) + piece // across * BLOCK_SIZE_ITER, piece % across, exists


def programs(config: Mapping[str, int], rows: int, columns: int, groups: int, device: torch.device) -> int:
    """Programs to launch: as many as a GPU runs at once, but no more than there are pieces."""
    pieces = (-(-rows // config["BLOCK_SIZE_ITER"]) + groups + 1) * max(-(-columns // config["BLOCK_SIZE"]), 1)
    return min(pieces, panels.PROGRAMS_PER_MULTIPROCESSOR * panels._multiprocessors(device))


def work_for(rows: int, columns: int, groups: int, device: torch.device) -> torch.Tensor:
    """The zeros to count in: the turns, finished pieces of every group, maxima of every column and row."""
    return torch.zeros(2 + groups + groups * columns + rows, dtype=torch.int32, device=device)


def invalid(config: Mapping[str, int], columns: int, limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay on so many columns, or None."""
    tile = config["BLOCK_SIZE"] * config["BLOCK_SIZE_ITER"]
    values = values_a_thread(config, tile, limits)
    if tile < 64 * 128:
        return f"pieces of {tile} elements: turns cost more than they bring"
    if reason := (
        wrong_tile(
            config,
            tile,
            limits,
            least=32,
            too_few="too few loads under way to hide the wait for a turn",
            held="two tiles do",
        )
        or too_many_shared_bytes(2 * tile, "to transpose", limits)
        or idle_columns(config["BLOCK_SIZE"], columns)
    ):
        return reason
    if config["maxnreg"] and limits.arch.startswith("gfx"):
        return "maxnreg is an option of NVIDIA's compiler"
    if config["maxnreg"] and values != 64:
        return f"maxnreg={config['maxnreg']} with {values} values a thread: more spills, or no program more"
    return None
