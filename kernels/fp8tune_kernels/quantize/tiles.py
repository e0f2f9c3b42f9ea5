"""Tiles of kernels that reduce over rows and write columns: read along one axis, written along the other.

Rows belong to groups that may start anywhere. Tiles start at multiples of 16 rows all the same, and what two groups
share of 16 rows is written byte by byte, so that all other stores are 16 bytes wide.

With an ALIGNMENT the codes of each group begin at a multiple of it, whatever row the group begins at, and end in zeros
up to the next: at least one multiple, also of an empty group. Tiles then start where their group does, and all stores
are 16 bytes wide.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .arithmetic import magnitude, quantize


class Matrix(NamedTuple):
    """A matrix whose rows fall into groups, and where the codes and scales of its columns go."""

    x_ptr: tl.tensor  # (M, K), row-major
    offs_ptr: tl.tensor  # (G,): the end row of each group; None: G equal groups
    q_ptr: tl.tensor  # row m of column k of group g: q_ptr + g * q_group_stride + k * q_stride + m
    scales_ptr: tl.tensor  # (G * K,), group-major
    M: tl.tensor
    K: tl.tensor
    G: tl.tensor
    q_stride: tl.tensor
    q_group_stride: tl.tensor
    ALIGNMENT: tl.constexpr  # of the groups in the codes; 1: codes lie as the rows do


class Options(NamedTuple):
    """Compile-time constants of a binary."""

    FP8_MAX: tl.constexpr
    POWER_OF_TWO: tl.constexpr
    BLOCK_SIZE: tl.constexpr
    BLOCK_SIZE_ITER: tl.constexpr
    LEAD: tl.constexpr
    num_warps: tl.constexpr


class Tile(NamedTuple):
    """Rows ``first + rows`` as far as they are in [start, end), which is their group, and columns."""

    first: tl.tensor
    rows: tl.tensor
    columns: tl.tensor
    start: tl.tensor
    end: tl.tensor


@triton.jit
def group_start(matrix: Matrix, group: tl.tensor) -> tl.tensor:
    """A group's first row."""
    return tl.where(group > 0, group_end(matrix, tl.maximum(group - 1, 0)), 0)


@triton.jit
def group_end(matrix: Matrix, group: tl.tensor) -> tl.tensor:
    """The row after a group's last; M for group G, which stands for the padding rows."""
    if matrix.offs_ptr is None:
        return tl.minimum(group + 1, matrix.G) * (matrix.M // tl.maximum(matrix.G, 1))
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        return tl.load(matrix.offs_ptr + group, mask=group < matrix.G, other=matrix.M)


@triton.jit
def stride_of_columns(M: tl.tensor, G: tl.tensor, ALIGNMENT: tl.constexpr) -> tl.tensor:
    """From a column of the codes to the next: M rounded up to 16, or :func:`fp8tune_kernels.groups.padded_rows`."""
    if ALIGNMENT == 1:
        return tl.cdiv(M, 16) * 16
    else:  # noqa: RET505
        return tl.cdiv(M + G * ALIGNMENT, ALIGNMENT) * ALIGNMENT


@triton.jit
def units_of(matrix: Matrix, start: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Return the multiples of the alignment that the codes of a group take."""
    return tl.maximum(tl.cdiv(end - start, matrix.ALIGNMENT), 1)


@triton.jit
def units_before(matrix: Matrix, group: tl.tensor) -> tl.tensor:
    """Return the units of all groups before a group."""
    units = 0
    for first in tl.range(0, group, 128, num_stages=1):
        groups = first + tl.arange(0, 128)
        counts = units_of(matrix, group_start(matrix, groups), group_end(matrix, groups))
        units += tl.sum(tl.where(groups < group, counts, 0))
    return units


@triton.jit
def q_of_group(matrix: Matrix, group: tl.tensor, units: tl.tensor) -> tl.tensor:
    """Return the pointer to a group's first code; ``units``: those of :func:`units_before`."""
    if matrix.ALIGNMENT == 1:
        return matrix.q_ptr + group.to(tl.int64) * matrix.q_group_stride
    else:  # noqa: RET505
        return matrix.q_ptr + units * matrix.ALIGNMENT


@triton.jit
def first_row(matrix: Matrix, start: tl.tensor) -> tl.tensor:
    """Return the first row of a group's tiles: the last multiple of 16 at or before its start, or that if aligned."""
    if matrix.ALIGNMENT == 1:
        return start // 16 * 16
    else:  # noqa: RET505
        return start


@triton.jit
def load_tile(matrix: Matrix, tile: Tile, end: tl.tensor, EVICTION: tl.constexpr) -> tl.tensor:
    """The values of a tile, zero outside of rows [start, end) and of K columns.

    Only ``first`` needs 64 bits: an address a row of them would cost a quarter of the registers.
    """
    first, rows, columns, start, _ = tile
    inside = ((rows >= start - first) & (rows < end - first))[:, None] & (columns < matrix.K)[None, :]
    at = matrix.x_ptr + first.to(tl.int64) * matrix.K + (rows[:, None] * matrix.K + columns[None, :])
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION)


@triton.jit
def store_tile(matrix: Matrix, q_ptr: tl.tensor, tile: Tile, q: tl.tensor, EVICTION: tl.constexpr) -> None:
    """The whole chunks of 16 rows of a tile: a mask that is constant over each keeps the stores 16 bytes wide.

    ``q_ptr``: of its group. Nothing where q_stride is no multiple of 16; :func:`store_edges` writes what this leaves
    out. With an alignment all rows up to the next multiple, and nothing is left out.
    """
    first, rows, columns, start, end = tile
    chunks = rows // 16 * 16
    if matrix.ALIGNMENT == 1:
        whole = (chunks >= start - first) & (chunks + 16 <= tl.where(matrix.q_stride % 16 == 0, end - first, 0))
        place = first
    else:
        place = (first - start) // 16 * 16  # the compiler cannot know it for a multiple of 16
        whole = chunks + 16 <= units_of(matrix, start, end) * matrix.ALIGNMENT - place
    q_columns = q_ptr + place + columns.to(tl.int64)[None, :] * (matrix.q_stride // 16 * 16)
    tl.store(
        q_columns + rows[:, None], q, mask=whole[:, None] & (columns < matrix.K)[None, :], eviction_policy=EVICTION
    )


@triton.jit
def clear_gap(matrix: Matrix, q_ptr: tl.tensor, tile: Tile, last: tl.tensor, scale: tl.tensor) -> None:
    """Zeros into rows [first, last) of a tile past its group's end, where a scale that is NaN made no zeros of them.

    After the tile was stored, which costs fewer registers than a mask for each of its codes.
    """
    first, _, columns, start, end = tile
    first = tl.maximum(first, end)
    last = tl.minimum(last, start + units_of(matrix, start, end) * matrix.ALIGNMENT)
    if first < last:
        spoiled = (columns < matrix.K) & (scale != scale)
        if tl.max(spoiled.to(tl.int32)) > 0:
            tl.debug_barrier()  # the stores of other threads come before
            zero = tl.zeros((columns.shape[0],), tl.uint8).to(q_ptr.dtype.element_ty, bitcast=True)
            q_columns = q_ptr + columns.to(tl.int64) * matrix.q_stride
            for place in tl.range(first - start, last - start, num_stages=1):
                tl.store(q_columns + place, zero, mask=spoiled)


@triton.jit
def store_edges(
    matrix: Matrix,
    q_ptr: tl.tensor,
    tile: Tile,
    last: tl.tensor,
    read_end: tl.tensor,
    scale: tl.tensor,
    FP8_MAX: tl.constexpr,
) -> None:
    """Store rows [first, last) of a group, byte by byte, in chunks of 16 shared with a neighbour: at most one at
    either end. All chunks where q_stride is no multiple of 16. Rows from ``read_end`` on become the code of 0."""
    first, _, columns, start, end = tile
    aligned = matrix.q_stride % 16 == 0
    last = tl.minimum(last, end)
    if (first < start) | ((last == end) & (end % 16 != 0)) | (matrix.q_stride % 16 != 0):
        chunks = tl.cdiv(last - first, 16)
        for chunk in tl.range(0, chunks, tl.where(aligned, tl.maximum(chunks - 1, 1), 1)):
            top = first + chunk * 16
            rows = tl.arange(0, 16)
            x = load_tile(matrix, Tile(top, rows, columns, start, end), read_end, "")
            q = quantize(x, scale[None, :], q_ptr.dtype.element_ty, FP8_MAX)
            whole = aligned & (top >= start) & (top + 16 <= end)
            inside = (rows >= start - top) & (rows < tl.where(whole, 0, end - top))
            q_columns = q_ptr + top + columns.to(tl.int64)[None, :] * matrix.q_stride
            tl.store(q_columns + rows[:, None], q, mask=inside[:, None] & (columns < matrix.K)[None, :])


@triton.constexpr_function
def folded_rows(rows: int, columns: int, num_warps: int) -> int:
    """Rows of running maxima for a tile of ``(rows, columns)``: as many as all threads hold at once in vectors of 8
    (a warp has at most 64 of them), so that folding a tile into them moves nothing between threads."""
    return rows // max(1, rows * columns // (num_warps * 64 * 8))


@triton.jit
def fold(tile: tl.tensor, FOLDED: tl.constexpr) -> tl.tensor:
    """A tile -> maxima of ``magnitude``, ``(FOLDED, columns)``, as wide as its values: of 16-bit ones two at a time.

    By Triton's own function of two, because ``tl.max`` would widen 16 bits to 32 first, and because its interpreter
    knows this one: any other it calls for each element, thousands of times slower.
    """
    by_fold = magnitude(tile).reshape(tile.shape[0] // FOLDED, FOLDED, tile.shape[1])
    return tl.reduce(by_fold, 0, tl.standard._elementwise_max)


@triton.jit
def top(folded: tl.tensor) -> tl.tensor:
    """Return the column maxima of a folded tile, int32, as atomics take them."""
    return tl.max(folded.to(tl.int32), 0)


@triton.jit
def of_any_layout(scale: tl.tensor) -> tl.tensor:
    """Return the scales so that the compiler can have a second copy in the layout of the store.

    A scale that comes of a reduction is tied to the layout of the load: the compiler then casts there, and transposes
    the codes through shared memory byte by byte. An identity gather unties it, and the input is transposed instead:
    16 bytes an access and, on NVIDIA, by ``ldmatrix``.
    """
    return tl.gather(scale, tl.arange(0, scale.shape[0]), 0)
