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
from triton.language.target_info import is_cuda

from fp8tune_kernels.quantize.arithmetic import canonical_nan, scale_of

__all__ = [
    "ALIGNMENT",
    "Block",
    "block_at",
    "bytes_of",
    "inverse_of",
    "largest_of_rows",
    "load_block",
    "load_codes",
    "packed_codes",
    "scale_of_bits",
    "store_block",
    "transpose_bytes",
]

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
def store_block(blocks_ptr: tl.tensor, block: Block, number: tl.tensor) -> None:
    """Write down a block for a later kernel: 4 integers."""
    at = blocks_ptr + number * 4
    tl.store(at, block.group)
    tl.store(at + 1, block.first)
    tl.store(at + 2, block.rows)
    tl.store(at + 3, block.is_first.to(tl.int32))


@triton.jit
def load_block(blocks_ptr: tl.tensor, number: tl.tensor, BLOCK_SIZE_M: tl.constexpr) -> Block:
    """What :func:`store_block` wrote."""
    at = blocks_ptr + number * 4
    return Block(tl.load(at), tl.load(at + 1), tl.load(at + 2), number * BLOCK_SIZE_M, tl.load(at + 3) > 0)


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
def packed_codes(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    fourth: tl.tensor,
    dtype: tl.constexpr,
    FP8_MAX: tl.constexpr,
) -> tl.tensor:
    """The codes of four tiles of float32, clamped, as one tile of 32-bit words. On NVIDIA by three instructions."""
    if is_cuda() and FP8_MAX == 448.0:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [first, second, third, fourth],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        low = _code(first, dtype, FP8_MAX) | (_code(second, dtype, FP8_MAX) << 8)
        return low | (_code(third, dtype, FP8_MAX) << 16) | (_code(fourth, dtype, FP8_MAX) << 24)


@triton.jit
def _code(values: tl.tensor, dtype: tl.constexpr, FP8_MAX: tl.constexpr) -> tl.tensor:
    """The code of a value, uint32."""
    clamped = tl.where(values > FP8_MAX, FP8_MAX, tl.where(values < -FP8_MAX, -FP8_MAX, values))
    codes = canonical_nan(clamped, clamped.to(dtype), FP8_MAX)
    return codes.to(tl.uint8, bitcast=True).to(tl.uint32)


@triton.jit
def inverse_of(factors: tl.tensor) -> tl.tensor:
    """1 / factors, rounded to nearest: exact of powers of two."""
    return tl.div_rn(tl.full(factors.shape, 1.0, tl.float32), factors)


@triton.jit
def load_codes(q_ptr: tl.tensor, C: tl.tensor, block: Block, rows: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Codes of a block's rows, of (M, C) row-major, as float32; zeros outside."""
    inside = (rows < block.rows)[:, None] & (columns < C)[None, :]
    from_ptr = bytes_of(q_ptr, 1) + block.first.to(tl.int64) * C
    codes = tl.load(from_ptr + (rows[:, None] * C + columns[None, :]), mask=inside, other=0)
    return codes.to(q_ptr.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def transpose_bytes(
    q_ptr: tl.tensor,
    to_ptr: tl.tensor,
    stride: tl.tensor,
    C: tl.tensor,
    column: tl.tensor,
    block: Block,
    PACK: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
) -> None:
    """BLOCK_SIZE_N columns of a block's codes, of (M, C) row-major, to words of PACK codes of a column.

    Zeros into the places that have no row. Codes are put together before they change threads: bytes would move through
    shared memory one by one. ``stride``: from a column to the next, in words.
    """
    words = tl.arange(0, BLOCK_SIZE_M // PACK)
    from_ptr = bytes_of(q_ptr, 1) + block.first.to(tl.int64) * C
    columns = column + tl.arange(0, BLOCK_SIZE_N)
    inside = (columns < C)[None, :]
    packed = tl.zeros((BLOCK_SIZE_M // PACK, BLOCK_SIZE_N), tl.uint32)
    for number in tl.static_range(PACK):
        rows = words * PACK + number
        codes = tl.load(
            from_ptr + (rows[:, None] * C + columns[None, :]), mask=(rows < block.rows)[:, None] & inside, other=0
        )
        packed = packed | (codes.to(tl.uint32) << (8 * number))
    at = to_ptr + words[:, None] + columns.to(tl.int64)[None, :] * stride
    tl.store(at, packed.to(to_ptr.dtype.element_ty), mask=inside & (words >= 0)[:, None])
