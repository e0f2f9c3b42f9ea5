"""Blocks of rows of one group each, and the maxima of rows that lie in registers whole.

A *place* is a row of a matrix in which each group begins at a multiple of 128 rows and has at least as many. Blocks are
of places, and a block's size divides 128: so it has rows of one group alone, and what a group has of its own is read
once a block. Places of rows without a group follow those of the last group.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .arithmetic import scale_of

ALIGNMENT = 128
"""Of the places at which groups begin."""


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
    group, begin, total = 0, 0, 0
    for first in range(0, G, 128):
        groups = first + tl.arange(0, 128)
        ends = tl.load(offs_ptr + groups, mask=groups < G, other=0)
        starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < G), other=0)
        units = tl.where(groups < G, tl.maximum(tl.cdiv(ends - starts, 128), 1), 0)
        is_before = (groups < G) & ((total + tl.cumsum(units, 0)) * 128 <= place)
        # how many groups are before, and their units, by one reduction: each meets all threads
        both = tl.sum(tl.where(is_before, (1 << 32) + units.to(tl.int64), 0), 0)
        group += (both >> 32).to(tl.int32)
        begin += (both & 0xFFFFFFFF).to(tl.int32) * 128
        if first + 128 < G:
            total += tl.sum(units, 0)
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group, mask=group < G, other=M)
    row = start + place - begin
    rows = tl.minimum(tl.maximum(end - row, 0), BLOCK_SIZE_M)
    return Block(group, row, rows, place, place == begin)


@triton.jit
def largest_of_rows(values: tl.tensor) -> tl.tensor:
    """The bits of each row's largest magnitude, for a float32 tile, int32: they order as values do, NaN last."""
    if is_cuda():  # a magnitude is part of the instruction there, which spares one an element
        return tl.reduce(tl.abs(values), 1, _larger).to(tl.int32, bitcast=True)
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def largest_of_both(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """Return :func:`largest_of_rows` of two tiles of a shape together: threads meet once."""
    if is_cuda():
        return largest_of_rows(_larger(tl.abs(left), tl.abs(right)))
    else:  # noqa: RET505
        return tl.maximum(largest_of_rows(left), largest_of_rows(right))


@triton.jit
def _larger(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of_bits(bits: tl.tensor, FP8_MAX: tl.constexpr) -> tl.tensor:
    """The scale, a power of two, of what :func:`largest_of_rows` found."""
    return scale_of(bits.to(tl.float32, bitcast=True), FP8_MAX, True)


@triton.jit
def inverse_of(factors: tl.tensor) -> tl.tensor:
    """1 / factors, rounded to nearest: exact of powers of two."""
    return tl.div_rn(tl.full(factors.shape, 1.0, tl.float32), factors)


@triton.jit
def load_codes(q_ptr: tl.tensor, C: tl.tensor, block: Block, rows: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Codes of a block's rows, of (M, C) row-major, as float32; zeros outside."""
    inside = (rows < block.rows)[:, None] & (columns < C)[None, :]
    from_ptr = q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + block.first.to(tl.int64) * C
    codes = tl.load(from_ptr + (rows[:, None] * C + columns[None, :]), mask=inside, other=0)
    return codes.to(q_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
