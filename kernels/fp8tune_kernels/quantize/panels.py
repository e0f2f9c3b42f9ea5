"""Quantize the columns of groups of rows: what colwise, colwise-dual, rowwise of a view and transpose-3d-atomic run.

A column of a group has to be read twice, for its maximum and for the cast. Two forms, chosen by the axis ``LEAD``:

*Walking twice* (``LEAD`` 0): each program walks the rows of its own columns twice. Right for short groups, whose second
read comes from registers or L1. With long ones more is under way on a GPU than L2 holds, and five bytes an element are
moved for three.

*Panels* (``LEAD`` above 0): all programs work on the same few panels, a *panel* being BLOCK_SIZE columns of one group
and a *piece* BLOCK_SIZE_ITER rows of it. Pieces are numbered group by group, panel by panel, downwards. A ticket, drawn
from a counter, is one turn: the maxima of a piece, taken into its panel's, or its cast. The casts run lag pieces behind
the maxima, in turn with them, so that L2 still holds the piece and its panel is complete or about to be: lag is the
pieces of the longest panel, and LEAD more.

A program waits only for the maxima of lower tickets. Whoever holds the least ticket that is not done is at work on it,
for the next one is drawn while a lower is worked on, and waits for nobody. So nothing needs a cooperative launch: it
ends with however few programs a GPU runs at once, beside whatever other kernels, and in an interpreter that runs one
program after the other.

On an H100 (us, walking twice / panels): 16640 x 5120 in 1, 16, 64 and 128 groups 167 / 120, 138 / 126, 121 / 139 and
124 / 166; 131072 x 7168 in 8 groups 1,760 / 1,189. A plain cast of as many values takes 92 and 944. Tried there and
slower: panels side by side, so that whole rows are read (1,600 at 131072 x 7168); both tiles in one turn (1,375);
telling L2 which tile to keep (1,288; with LEAD 384 1,328); LEAD 96 (1,290); short groups through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..spec import DeviceLimits
from .arithmetic import magnitude_to_float32, quantize, scale_of
from .limits import idle_columns, too_many_shared_bytes, values_a_thread, wrong_tile
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
    units_before,
    units_of,
)

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_ITER": (64, 128, 256, 512),
    "LEAD": (0, 192),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 4),
    "maxnreg": (0, 168),
}
"""``maxnreg``: registers a thread may have, 0 for as many as the compiler likes; NVIDIA's alone. With 168, three
programs of 4 warps run on an SM at once, for some spilled addresses: 190 us instead of 194 at 16640 x 8192 in 64
groups on an H100."""

PROGRAMS_PER_MULTIPROCESSOR = 16
"""Of panels, at most: those that do not fit draw their first ticket when all are gone, and end."""


@triton.jit
def quantize_columns(
    matrix: Matrix, work_ptr: tl.tensor, program: tl.tensor, options: Options, num_stages: tl.constexpr
) -> None:
    """Do the work of one of :func:`programs`; ``program`` says which, if each walks columns of its own.

    ``work_ptr``: what :func:`work_for` gave; not used where LEAD is 0.
    """
    if options.LEAD == 0:
        _walk_twice(matrix, program, options, num_stages)
    else:
        _work_on_panels(matrix, work_ptr, options)


@triton.jit
def _walk_twice(matrix: Matrix, program: tl.tensor, options: Options, num_stages: tl.constexpr) -> None:
    """BLOCK_SIZE columns of one group, or (group G) of the padding rows, BLOCK_SIZE_ITER rows at a time.

    The first tile stays in registers: a group no longer than that is read once. It is cast first, so that its
    registers are free for the others: at 64 x 256 in 4 warps 241 a thread on sm_90, or 168 and 8 bytes spilled, where
    it was 255 and 24. These are cast backwards, so that those read last are found in the cache.
    """
    blocks = tl.cdiv(matrix.K, options.BLOCK_SIZE)
    group = program // blocks
    columns = program % blocks * options.BLOCK_SIZE + tl.arange(0, options.BLOCK_SIZE)
    rows = tl.arange(0, options.BLOCK_SIZE_ITER)
    start, end = group_start(matrix, group), group_end(matrix, group)
    read_end = tl.where(group < matrix.G, end, start)  # the padding rows are not read: they become the code of 0
    first = first_row(matrix, start)
    tiles = tl.cdiv(end - first, options.BLOCK_SIZE_ITER)

    first_tile = Tile(first, rows, columns, start, end)
    first_x = load_tile(matrix, first_tile, read_end, "")
    units = 0
    if matrix.ALIGNMENT > 1:
        units = units_before(matrix, group)  # while the tile is on its way
    FOLDED: tl.constexpr = folded_rows(options.BLOCK_SIZE_ITER, options.BLOCK_SIZE, options.num_warps)
    largest = fold(first_x, FOLDED)
    for number in tl.range(1, tl.where(group < matrix.G, tiles, 0), num_stages=num_stages):
        tile = Tile(first + number * options.BLOCK_SIZE_ITER, rows, columns, start, end)
        x = load_tile(matrix, tile, read_end, "")
        largest = tl.maximum(largest, fold(x, FOLDED))
    amax = magnitude_to_float32(top(largest), matrix.x_ptr.dtype.element_ty)
    scale = scale_of(amax, options.FP8_MAX, options.POWER_OF_TWO)
    inside = columns < tl.where(group < matrix.G, matrix.K, 0)
    tl.store(matrix.scales_ptr + group.to(tl.int64) * matrix.K + columns, scale, mask=inside)

    scale = of_any_layout(scale)
    q_ptr = q_of_group(matrix, group, units)
    q = quantize(first_x, scale[None, :], q_ptr.dtype.element_ty, options.FP8_MAX)
    store_tile(matrix, q_ptr, first_tile, q, "")
    if matrix.ALIGNMENT > 1:
        tiles = tl.cdiv(units_of(matrix, start, end) * matrix.ALIGNMENT, options.BLOCK_SIZE_ITER)
    for number in tl.range(1, tl.where(matrix.q_stride % 16 == 0, tiles, 0), num_stages=num_stages):
        tile = Tile(first + (tiles - number) * options.BLOCK_SIZE_ITER, rows, columns, start, end)
        x = load_tile(matrix, tile, read_end, "")
        q = quantize(x, scale[None, :], q_ptr.dtype.element_ty, options.FP8_MAX)
        store_tile(matrix, q_ptr, tile, q, "")
    if matrix.ALIGNMENT == 1:
        store_edges(matrix, q_ptr, first_tile, end, read_end, scale, options.FP8_MAX)
    else:
        clear_gap(matrix, q_ptr, first_tile, first + tiles * options.BLOCK_SIZE_ITER, scale)


class _Cursor(NamedTuple):
    """A program's present group of rows."""

    group: tl.tensor
    base: tl.tensor  # the number of its first piece
    start: tl.tensor
    end: tl.tensor
    units: tl.tensor  # of the groups before it, where groups are aligned


@triton.jit
def _work_on_panels(matrix: Matrix, work_ptr: tl.tensor, options: Options) -> None:
    """Turns until there are no tickets left: the maxima of a piece, or its cast. The next ticket is drawn as a turn
    begins, so that its way to L2 and back costs nothing; who holds it works on a lower one meanwhile.
    """
    panels = tl.cdiv(matrix.K, options.BLOCK_SIZE)
    done_ptr = work_ptr + 1
    amax_ptr = done_ptr + matrix.G * panels
    pieces, longest = _pieces(matrix, options.BLOCK_SIZE_ITER)
    pieces *= panels
    lag = tl.minimum(longest + options.LEAD, pieces)
    rows = tl.arange(0, options.BLOCK_SIZE_ITER)
    lanes = tl.arange(0, options.BLOCK_SIZE)
    zero = tl.full([], 0, tl.int32)
    new = _Cursor(zero, zero, zero, group_end(matrix, zero), zero)
    old = new

    ticket = tl.atomic_add(work_ptr, 1, sem="relaxed")
    while ticket < 2 * pieces:
        following = tl.atomic_add(work_ptr, 1, sem="relaxed")
        piece, is_maxima = _piece_of(ticket, pieces, lag)
        at = _Cursor(zero, zero, zero, zero, zero)
        if is_maxima:
            new = _advance(matrix, piece, new, panels, options.BLOCK_SIZE_ITER)
            at = new
        else:
            old = _advance(matrix, piece, old, panels, options.BLOCK_SIZE_ITER)
            at = old
        group, base, start, end, units = at
        panel, first, in_panel = _locate(matrix, piece - base, at, options.BLOCK_SIZE_ITER)
        columns = panel * options.BLOCK_SIZE + lanes
        in_group = columns < tl.where(group < matrix.G, matrix.K, 0)
        tile = Tile(first, rows, columns, start, end)
        x = load_tile(matrix, tile, tl.where(group < matrix.G, end, start), "")
        if is_maxima:
            largest = top(fold(x, folded_rows(options.BLOCK_SIZE_ITER, options.BLOCK_SIZE, options.num_warps)))
            tl.atomic_max(amax_ptr + group * matrix.K + columns, largest, mask=in_group, sem="relaxed")
            tl.debug_barrier()  # all threads' maxima before the one count that publishes them
            tl.atomic_add(done_ptr + group * panels + panel, 1, mask=group < matrix.G, sem="release")
        else:
            scale = _finished_scale(
                matrix,
                done_ptr + group * panels + panel,
                amax_ptr + group * matrix.K + columns,
                in_panel,
                group < matrix.G,
                in_group,
                options,
            )
            inside = in_group & (first == first_row(matrix, start))
            tl.store(matrix.scales_ptr + group.to(tl.int64) * matrix.K + columns, scale, mask=inside)
            q = quantize(x, of_any_layout(scale)[None, :], matrix.q_ptr.dtype.element_ty, options.FP8_MAX)
            store_tile(matrix, q_of_group(matrix, group, units), tile, q, "evict_first")
            if matrix.ALIGNMENT > 1:
                clear_gap(matrix, q_of_group(matrix, group, units), tile, first + options.BLOCK_SIZE_ITER, scale)
        ticket = following
    if matrix.ALIGNMENT == 1:
        _store_edges_of_panels(matrix, done_ptr, amax_ptr, panels, options)


@triton.jit
def _finished_scale(
    matrix: Matrix,
    done_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    in_panel: tl.tensor,
    is_group: tl.tensor,
    inside: tl.tensor,
    options: Options,
) -> tl.tensor:
    """The scales of a panel, once all its maxima are in; of the padding rows, which have none, any."""
    if is_group:
        while tl.atomic_add(done_ptr, 0, sem="acquire") < in_panel:
            pass
    bits = tl.load(amax_ptr, mask=inside, other=0, cache_modifier=".cg")
    amax = magnitude_to_float32(bits, matrix.x_ptr.dtype.element_ty)
    return scale_of(amax, options.FP8_MAX, options.POWER_OF_TWO)


@triton.jit
def _store_edges_of_panels(
    matrix: Matrix, done_ptr: tl.tensor, amax_ptr: tl.tensor, panels: tl.tensor, options: Options
) -> None:
    """Store what tiles leave out, by panel, when there are no tickets left: as a part of each turn it would cost 60
    registers a thread, and half of the programs an SM can run. Nothing where all groups begin at multiples of 16.
    """
    uneven = matrix.q_stride % 16
    for group in tl.range(0, matrix.G + 1, 128, num_stages=1):
        groups = group + tl.arange(0, 128)
        uneven += tl.sum(tl.where(groups <= matrix.G, group_end(matrix, groups) % 16, 0))
    if uneven != 0:
        for item in tl.range(tl.program_id(0), panels * (matrix.G + 1), tl.num_programs(0), num_stages=1):
            group = item // panels
            columns = item % panels * options.BLOCK_SIZE + tl.arange(0, options.BLOCK_SIZE)
            start, end = group_start(matrix, group), group_end(matrix, group)
            inside = columns < tl.where(group < matrix.G, matrix.K, 0)
            scale = _finished_scale(
                matrix,
                done_ptr + item,
                amax_ptr + group * matrix.K + columns,
                _pieces_of(matrix, group, start, end, options.BLOCK_SIZE_ITER),
                group < matrix.G,
                inside,
                options,
            )
            read_end = tl.where(group < matrix.G, end, start)
            q_ptr = q_of_group(matrix, group, 0)
            tile = Tile(first_row(matrix, start), columns, columns, start, end)  # edges have rows of their own
            store_edges(matrix, q_ptr, tile, end, read_end, scale, options.FP8_MAX)


@triton.jit
def _piece_of(ticket: tl.tensor, pieces: tl.tensor, lag: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A ticket -> its piece, and whether it is for the maxima: lag pieces ahead of the casts, in turn with them."""
    later = ticket - lag
    left = later - 2 * (pieces - lag)
    is_maxima = (later < 0) | ((left < 0) & (later % 2 == 0))
    in_turn = later // 2 + tl.where(is_maxima, lag, 0)
    return tl.where(later < 0, ticket, tl.where(left < 0, in_turn, pieces - lag + left)), is_maxima


@triton.jit
def _pieces_of(
    matrix: Matrix, group: tl.tensor, start: tl.tensor, end: tl.tensor, BLOCK_SIZE_ITER: tl.constexpr
) -> tl.tensor:
    """Pieces of one panel of a group: an empty group has one as well, which writes its scales. The padding rows have
    none where groups are aligned: they have no codes."""
    if matrix.ALIGNMENT == 1:
        return tl.maximum(tl.cdiv(end - first_row(matrix, start), BLOCK_SIZE_ITER), 1)
    else:  # noqa: RET505
        pieces = tl.cdiv(units_of(matrix, start, end) * matrix.ALIGNMENT, BLOCK_SIZE_ITER)
        return tl.where(group < matrix.G, pieces, 0)


@triton.jit
def _pieces(matrix: Matrix, BLOCK_SIZE_ITER: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Pieces of one panel of every group together, and of the longest; the padding rows count as a group."""
    total, longest = 0, 0
    for group in tl.range(0, matrix.G + 1, 128, num_stages=1):
        groups = group + tl.arange(0, 128)
        starts, ends = group_start(matrix, groups), group_end(matrix, groups)
        pieces = _pieces_of(matrix, groups, starts, ends, BLOCK_SIZE_ITER)
        pieces = tl.where(groups <= matrix.G, pieces, 0)
        total += tl.sum(pieces)
        longest = tl.maximum(longest, tl.max(pieces))
    return total, longest


@triton.jit
def _advance(
    matrix: Matrix, piece: tl.tensor, at: _Cursor, panels: tl.tensor, BLOCK_SIZE_ITER: tl.constexpr
) -> _Cursor:
    """Move a cursor on to the group that has a piece; no further than the padding rows."""
    group, base, start, end, units = at
    while (piece >= base + _pieces_of(matrix, group, start, end, BLOCK_SIZE_ITER) * panels) & (group < matrix.G):
        base += _pieces_of(matrix, group, start, end, BLOCK_SIZE_ITER) * panels
        if matrix.ALIGNMENT > 1:
            units += units_of(matrix, start, end)
        group += 1
        start = end
        end = group_end(matrix, group)
    return _Cursor(group, base, start, end, units)


@triton.jit
def _locate(
    matrix: Matrix, piece: tl.tensor, at: _Cursor, BLOCK_SIZE_ITER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A piece of a group -> its panel, its first row, and how many pieces the panel has."""
    in_panel = _pieces_of(matrix, at.group, at.start, at.end, BLOCK_SIZE_ITER)
    return piece // in_panel, first_row(matrix, at.start) + piece % in_panel * BLOCK_SIZE_ITER, in_panel


def programs(
    config: Mapping[str, int], rows: int, columns: int, groups: int, device: torch.device, alignment: int = 1
) -> int:
    """Programs to launch: one a block of columns of every group and, where groups are not aligned, of the padding rows;
    of panels as many as a GPU runs at once, but no more than there can be turns. ``rows``: those of the codes."""
    blocks = -(-columns // config["BLOCK_SIZE"])
    if not config["LEAD"]:
        return blocks * (groups + 1) if alignment == 1 else blocks * groups
    turns = 2 * blocks * (-(-rows // config["BLOCK_SIZE_ITER"]) + groups + 1)
    return min(turns, PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(device))


def work_for(config: Mapping[str, int], columns: int, groups: int, unused: torch.Tensor) -> torch.Tensor:
    """The zeros that panels count in: the ticket counter, finished pieces of every panel, maxima of every column.

    Walking twice needs none: ``unused``, any tensor of the launch, stands in for them.
    """
    if not config["LEAD"]:
        return unused
    panels = groups * -(-columns // config["BLOCK_SIZE"])
    return torch.zeros(1 + panels + groups * columns, dtype=torch.int32, device=unused.device)


def options(config: Mapping[str, int]) -> dict[str, int]:
    """A config as a launch takes it: Triton wants ``maxnreg`` left out rather than 0."""
    return {name: value for name, value in config.items() if name != "maxnreg" or value}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """SMs or CUs. On a CPU any number does; of meta tensors, which are compiled for, many: they fill any GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4 if device.type == "cpu" else 512


def invalid(config: Mapping[str, int], columns: int, limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay on so many columns, or None."""
    elements, stages = config["BLOCK_SIZE"] * config["BLOCK_SIZE_ITER"], config["num_stages"]
    values = values_a_thread(config, elements, limits)
    staged = 2 * elements * stages if stages > 1 else 0
    if reason := (
        wrong_tile(config, elements, limits, held="the tile and its maxima do")
        or too_many_shared_bytes(staged, "of tiles in flight", limits)
        or idle_columns(config["BLOCK_SIZE"], columns)
    ):
        return reason
    if config["maxnreg"]:
        if limits.arch.startswith("gfx"):
            return "maxnreg is an option of NVIDIA's compiler"
        if (values, config["num_warps"], stages) != (128, 4, 1):
            return f"maxnreg={config['maxnreg']} is for 4 warps of 128 values a thread, one tile at a time"
    if config["LEAD"] and stages > 1:
        return "same as num_stages=1: a piece is one tile"
    if config["LEAD"] and (config["BLOCK_SIZE"] < 64 or values < 64):
        return "panels with less than 64 columns or values a thread: tickets cost more than they bring"
    return None
