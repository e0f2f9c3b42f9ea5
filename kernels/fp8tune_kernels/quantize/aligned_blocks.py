"""Blocks of rows whose codes are written twice: by rows, and transposed in groups that begin at multiples of 128 rows.

A program casts the rows of one block, a few at a time, each whole row in registers, and writes their codes by rows.
Then it reads these bytes again, which its caches hold, and writes them transposed. So nothing of an input is read
twice, and no program waits for another.

A *place* is a row of the transposed codes. Blocks are of places: one has rows of one group alone, as the alignment is a
multiple of its size. Places of the rows of no group follow those of the last group, and have no transposed codes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from fp8tune_kernels.quantize.arithmetic import scale_of

__all__ = ["ALIGNMENT", "Block", "block_at", "bytes_of", "largest_of_rows", "scale_of_bits", "transpose_bytes"]

ALIGNMENT = 128
"""Of the groups in transposed codes: what ``grouped-contraction`` reads without masks."""


class Block(NamedTuple):
    """Consecutive rows of one group and their place."""

    group: tl.tensor  # G: rows of no group
    first: tl.tensor
    rows: tl.tensor  # how many there are; less than a block at the end of a group, none past all rows
    place: tl.tensor
    is_first: tl.tensor  # of its group


@triton.jit
def block_at(offs_ptr: tl.tensor, M: tl.tensor, G: tl.tensor, place: tl.tensor, BLOCK_SIZE_M: tl.constexpr) -> Block:
    """The block of BLOCK_SIZE_M places from ``place`` on, a multiple of it."""
    group, start, begin, total = 0, 0, 0, 0
    for first in range(0, G, 128):
        groups = first + tl.arange(0, 128)
        ends = tl.load(offs_ptr + groups, mask=groups < G, other=0)
        starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < G), other=0)
        places = tl.where(groups < G, tl.maximum(tl.cdiv(ends - starts, 128), 1) * 128, 0)
        place_ends = total + tl.cumsum(places, 0)
        is_before = (groups < G) & (place_ends <= place)
        group += tl.sum(is_before.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(is_before, ends, 0), 0))
        begin = tl.maximum(begin, tl.max(tl.where(is_before, place_ends, 0), 0))
        total += tl.sum(places, 0)
    end = tl.load(offs_ptr + group, mask=group < G, other=M)
    row = start + place - begin
    rows = tl.minimum(tl.maximum(end - row, 0), BLOCK_SIZE_M)
    return Block(group, row, rows, place, place == begin)


@triton.jit
def largest_of_rows(values: tl.tensor) -> tl.tensor:
    """The bits of the largest magnitude of each row of a float32 tile, int32: they order as values do, NaN last."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_of_bits(bits: tl.tensor, FP8_MAX: tl.constexpr) -> tl.tensor:
    """The scale, a power of two, of what :func:`largest_of_rows` found."""
    return scale_of(bits.to(tl.float32, bitcast=True), FP8_MAX, True)


@triton.jit
def bytes_of(ptr: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """A pointer to codes as one to unsigned integers of WIDTH bytes."""
    if WIDTH == 4:
        return ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    elif WIDTH == 2:  # noqa: RET505 - Triton drops a branch only where all are written
        return ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    else:
        return ptr.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def transpose_bytes(
    q_ptr: tl.tensor,
    transposed_ptr: tl.tensor,
    stride: tl.tensor,
    C: tl.tensor,
    columns_start: tl.tensor,
    columns_end: tl.tensor,
    block: Block,
    PACK: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
) -> None:
    """Some columns of a block's codes, of (M, C) row-major, to their place in (P, C), strides (1, P).

    Zeros into the places that have no row. PACK codes of a column are put together before they change threads: bytes
    would move through shared memory one by one. ``stride``: P // PACK.
    """
    words = tl.arange(0, BLOCK_SIZE_M // PACK)
    from_ptr = bytes_of(q_ptr, 1) + block.first.to(tl.int64) * C
    to_ptr = bytes_of(transposed_ptr, PACK) + block.place // PACK
    for column in tl.range(columns_start, columns_end, BLOCK_SIZE_N, num_stages=1):
        columns = column + tl.arange(0, BLOCK_SIZE_N)
        inside = (columns < columns_end)[None, :]
        packed = tl.zeros((BLOCK_SIZE_M // PACK, BLOCK_SIZE_N), tl.uint32)
        for number in tl.static_range(PACK):
            rows = words * PACK + number
            at = from_ptr + (rows[:, None] * C + columns[None, :])
            codes = tl.load(at, mask=(rows < block.rows)[:, None] & inside, other=0)
            packed = packed | (codes.to(tl.uint32) << (8 * number))
        at = to_ptr + words[:, None] + columns.to(tl.int64)[None, :] * stride
        tl.store(at, packed.to(to_ptr.dtype.element_ty), mask=inside & (words >= 0)[:, None])
