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

import torch
import triton
import triton.language as tl

from fp8tune_kernels.quantize import panels
from fp8tune_kernels.quantize.arithmetic import magnitude, magnitude_to_float32, quantize, scale_of
from fp8tune_kernels.quantize.panels import _pieces_of as blocks_of_rows
from fp8tune_kernels.quantize.tiles import (
    first_row,
    fold,
    folded_rows,
    group_end,
    load_tile,
    of_any_layout,
    store_edges,
    store_tile,
    top,
)
from fp8tune_kernels.spec import DeviceLimits

__all__ = ["AXES", "invalid", "programs", "quantize_both_ways", "work_for"]

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


@triton.jit
def quantize_both_ways(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,), or None: G equal groups
    q_rows_ptr: tl.tensor,  # (M, K), row-major
    row_scales_ptr: tl.tensor,  # (M,)
    q_ptr: tl.tensor,  # row m of column k of group g: q_ptr + g * q_group_stride + k * q_stride + m
    scales_ptr: tl.tensor,  # (G * K,), group-major
    work_ptr: tl.tensor,  # (work_for(...),), int32, zeros
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    q_stride: tl.tensor,
    q_group_stride: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    LEAD: tl.constexpr,
    num_warps: tl.constexpr,
) -> None:
    """Turns until there are none left. Both tiles of a turn are asked for at once, so that one wait serves two.

    Rows past the last group are quantized row by row like any other; column by column they become zeros.
    """
    across = tl.maximum(tl.cdiv(K, BLOCK_SIZE), 1)  # without a column, rows have scales all the same
    done_ptr = work_ptr + 1
    amax_ptr = done_ptr + G + 1
    row_amax_ptr = amax_ptr + G * K
    turns = _turns(offs_ptr, M, G, across, BLOCK_SIZE_ITER) + LEAD
    rows = tl.arange(0, BLOCK_SIZE_ITER)
    lanes = tl.arange(0, BLOCK_SIZE)
    # Two cursors, each a group: its number, the turn it begins in, its first row and the row after its last.
    zero = tl.full([], 0, tl.int32)
    new_group, new_begin, new_start, new_end = zero, zero, zero, group_end(offs_ptr, zero, M, G)
    old_group, old_begin, old_start, old_end = zero, zero, zero, new_end

    turn = tl.atomic_add(work_ptr, 1, sem="relaxed")
    while turn < turns:
        new_group, new_begin, new_start, new_end = _advance(
            offs_ptr, turn, 1, new_group, new_begin, new_start, new_end, M, G, across, BLOCK_SIZE_ITER
        )
        new_first, new_panel, is_new = _locate(turn - new_begin, new_start, new_end, across, BLOCK_SIZE_ITER)
        new_columns = new_panel * BLOCK_SIZE + lanes
        new_until = tl.where(is_new, new_end, new_start)
        new = load_tile(x_ptr, new_first, rows, new_columns, K, new_start, new_until, "evict_last")

        late = turn - LEAD
        old_group, old_begin, old_start, old_end = _advance(
            offs_ptr, late, 2, old_group, old_begin, old_start, old_end, M, G, across, BLOCK_SIZE_ITER
        )
        in_group = blocks_of_rows(old_start, old_end, BLOCK_SIZE_ITER) * across
        old_first, old_panel, is_old = _locate(late - old_begin - in_group, old_start, old_end, across, BLOCK_SIZE_ITER)
        old_columns = old_panel * BLOCK_SIZE + lanes
        old_until = tl.where(is_old, old_end, old_start)
        old = load_tile(x_ptr, old_first, rows, old_columns, K, old_start, old_until, "evict_first")

        if is_new:
            of_rows = tl.max(magnitude(new), 1)
            inside = (rows >= new_start - new_first) & (rows < new_end - new_first)
            tl.atomic_max(row_amax_ptr + new_first + rows, of_rows, mask=inside, sem="relaxed")
            largest = top(fold(new, folded_rows(BLOCK_SIZE_ITER, BLOCK_SIZE, num_warps)))
            inside = new_columns < tl.where(new_group < G, K, 0)
            tl.atomic_max(amax_ptr + new_group * K + new_columns, largest, mask=inside, sem="relaxed")
            tl.debug_barrier()  # all threads' maxima before the one count that publishes them
            tl.atomic_add(done_ptr + new_group, 1, sem="release")
        if is_old:
            while tl.atomic_add(done_ptr + old_group, 0, sem="acquire") < in_group:
                pass
            inside = old_columns < tl.where(old_group < G, K, 0)
            bits = tl.load(amax_ptr + old_group * K + old_columns, mask=inside, other=0, cache_modifier=".cg")
            scale = scale_of(magnitude_to_float32(bits, x_ptr.dtype.element_ty), FP8_MAX, POWER_OF_TWO)
            inside &= old_first == first_row(old_start)
            tl.store(scales_ptr + old_group.to(tl.int64) * K + old_columns, scale, mask=inside)
            scale = of_any_layout(scale)
            q_group_ptr = q_ptr + old_group.to(tl.int64) * q_group_stride
            if old_group < G:  # a branch, as no scale makes a zero of what padding rows may hold
                q = quantize(old, scale[None, :], q_ptr.dtype.element_ty, FP8_MAX)
                store_tile(q_group_ptr, old_first, rows, old_columns, K, q_stride, old_start, old_end, q, "evict_first")
            else:
                q = tl.zeros((BLOCK_SIZE_ITER, BLOCK_SIZE), tl.uint8).to(q_ptr.dtype.element_ty, bitcast=True)
                store_tile(q_group_ptr, old_first, rows, old_columns, K, q_stride, old_start, old_end, q, "evict_first")
            _cast_rows(
                old,
                q_rows_ptr,
                row_scales_ptr,
                row_amax_ptr,
                K,
                old_start,
                old_end,
                old_first,
                rows,
                old_columns,
                old_panel == 0,
                x_ptr.dtype.element_ty,
                FP8_MAX,
                POWER_OF_TWO,
            )
            store_edges(
                x_ptr,
                q_group_ptr,
                old_first,
                old_first + BLOCK_SIZE_ITER,
                old_columns,
                K,
                q_stride,
                old_start,
                tl.where(old_group < G, old_end, old_start),
                old_end,
                scale,
                FP8_MAX,
            )
        turn = tl.atomic_add(work_ptr, 1, sem="relaxed")


@triton.jit
def _cast_rows(
    x: tl.tensor,
    q_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    K: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    writes_scales: tl.tensor,
    dtype: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    """A tile by the maxima of its rows. After the cast of its columns: it would else share that one's conversion to
    float32, which ties both to the layout of the load, and codes were transposed byte by byte."""
    inside = (rows >= start - first) & (rows < end - first)
    bits = tl.load(amax_ptr + first + rows, mask=inside, other=0, cache_modifier=".cg")
    scale = scale_of(magnitude_to_float32(bits, dtype), FP8_MAX, POWER_OF_TWO)
    tl.store(scales_ptr + first + rows, scale, mask=inside & writes_scales)
    q = quantize(x, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    tile = q_ptr + first.to(tl.int64) * K + (rows[:, None] * K + columns[None, :])
    tl.store(tile, q, mask=inside[:, None] & (columns < K)[None, :], eviction_policy="evict_first")


@triton.jit
def _turns(
    offs_ptr: tl.tensor, M: tl.tensor, G: tl.tensor, across: tl.tensor, BLOCK_SIZE_ITER: tl.constexpr
) -> tl.tensor:
    """Turns until the casts of the last group end, but for LEAD; the padding rows count as a group."""
    total = 0
    for group in tl.range(0, G + 1, 128, num_stages=1):
        groups = group + tl.arange(0, 128)
        starts = tl.where(groups > 0, group_end(offs_ptr, tl.maximum(groups - 1, 0), M, G), 0)
        ends = group_end(offs_ptr, groups, M, G)
        blocks = blocks_of_rows(starts, ends, BLOCK_SIZE_ITER)
        following = blocks_of_rows(ends, group_end(offs_ptr, groups + 1, M, G), BLOCK_SIZE_ITER)
        blocks += tl.maximum(blocks - tl.where(groups < G, following, 0), 0)
        total += tl.sum(tl.where(groups <= G, blocks, 0))
    return total * across


@triton.jit
def _advance(
    offs_ptr: tl.tensor,
    turn: tl.tensor,
    READS: tl.constexpr,
    group: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    M: tl.tensor,
    G: tl.tensor,
    across: tl.tensor,
    BLOCK_SIZE_ITER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Move a cursor on from groups that were read READS times before a turn; no further than the padding rows."""
    pieces = blocks_of_rows(start, end, BLOCK_SIZE_ITER) * across
    while (turn >= begin + READS * pieces) & (group < G):
        begin += pieces
        group += 1
        start = end
        end = group_end(offs_ptr, group, M, G)
        longer = pieces
        pieces = blocks_of_rows(start, end, BLOCK_SIZE_ITER) * across
        begin += tl.maximum(longer - pieces, 0)
    return group, begin, start, end


@triton.jit
def _locate(
    piece: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    across: tl.tensor,
    BLOCK_SIZE_ITER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A piece of a group -> its first row, its block of columns, and whether the group has such a piece."""
    exists = (piece >= 0) & (piece < blocks_of_rows(start, end, BLOCK_SIZE_ITER) * across)
    piece = tl.where(exists, piece, 0)
    return first_row(start) + piece // across * BLOCK_SIZE_ITER, piece % across, exists


def programs(config: Mapping[str, int], rows: int, columns: int, groups: int, device: torch.device) -> int:
    """Programs to launch: as many as a GPU runs at once, but no more than there are pieces."""
    pieces = (-(-rows // config["BLOCK_SIZE_ITER"]) + groups + 1) * max(-(-columns // config["BLOCK_SIZE"]), 1)
    return min(pieces, panels.PROGRAMS_PER_MULTIPROCESSOR * panels._multiprocessors(device))


def work_for(rows: int, columns: int, groups: int, device: torch.device) -> torch.Tensor:
    """The zeros to count in: the turns, finished pieces of every group, maxima of every column and row."""
    return torch.zeros(2 + groups + groups * columns + rows, dtype=torch.int32, device=device)


def invalid(config: Mapping[str, int], columns: int, limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay on so many columns, or None."""
    threads = config["num_warps"] * limits.warp_size
    tile = config["BLOCK_SIZE"] * config["BLOCK_SIZE_ITER"]
    values = tile // threads
    if threads > limits.max_threads_per_block:
        return f"{threads} threads a block, {limits.arch} has at most {limits.max_threads_per_block}"
    if tile < 64 * 128:
        return f"pieces of {tile} elements: turns cost more than they bring"
    if values < 32:
        return f"{values} values a thread: too few loads under way to hide the wait for a turn"
    if values > 128:
        return f"{values} values a thread: two tiles do not fit in registers"
    if 2 * tile > limits.shared_bytes_per_block:
        room = limits.shared_bytes_per_block
        return f"{2 * tile} bytes to transpose, {limits.arch} has {room} of shared memory a block"
    if config["BLOCK_SIZE"] >= 2 * columns:
        return f"{config['BLOCK_SIZE']} columns a block for {columns}: half of the threads idle"
    if config["maxnreg"] and limits.arch.startswith("gfx"):
        return "maxnreg is an option of NVIDIA's compiler"
    if config["maxnreg"] and values != 64:
        return f"maxnreg={config['maxnreg']} with {values} values a thread: more spills, or no program more"
    return None
