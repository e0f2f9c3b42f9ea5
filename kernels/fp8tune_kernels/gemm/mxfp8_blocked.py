"""E8M0 scales in the blocked layout that block-scaled GEMMs of sm_100 read, group by group, on the device.

A matrix of scales is cut into tiles of 128 x 4, padded with zeros, which follow each other row of tiles by row of tiles

    element (r, c) of a tile is byte (r % 32)*16 + (r // 32)*4 + c       cuBLAS, "1D Block Scaling Factors Layout"

Each group is a matrix of its own:

    of_row_groups      (M, C) + offs   ->  (P, C4)       groups of rows; P = M + 127*G, rounded up to 128
    of_column_groups   (R, C) + offs   ->  (R128, P)     groups of columns; P = C + 3*G, rounded up to 4
    of_experts         (E, R, C)       ->  (E, R128*C4)  groups of R rows each

R128 and C4 are rounded up to 128 and 4. ``offs`` counts rows of what was quantized, of which 32 are one column of
``of_column_groups``. How much of P is used only the device knows; zeros follow it. The shapes are what
``torch._scaled_grouped_mm`` checks, no more: groups begin where the one before ends, not at a row of the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import interpreter
from ..quantize.mxfp8_arithmetic import MX_BLOCK
from ..runtime.ops import define
from .token_groups import group_of_row

__all__ = ["of_column_groups", "of_experts", "of_row_groups"]

ROWS, COLUMNS = 128, 4
"""Of a tile."""


@triton.jit(do_not_specialize=["R", "C", "G", "GROUP_ROWS"])  # rows are a dim of each: nothing may recompile
def blocked_kernel(
    scales_ptr: tl.tensor,  # (R, C), row-major, E8M0 codes
    offs_ptr: tl.tensor,  # (G,); None: groups of GROUP_ROWS rows
    blocked_ptr: tl.tensor,  # tiles of 512 bytes
    R: tl.tensor,
    C: tl.tensor,
    G: tl.tensor,
    GROUP_ROWS: tl.tensor,
    BY_COLUMNS: tl.constexpr,
) -> None:
    """One program: a tile of the result, all of one group or of none."""
    program = tl.program_id(0)
    first_row, first_column, row_end, column_end = 0, 0, R, C
    place = program.to(tl.int64)
    if BY_COLUMNS:
        tiles_down = tl.cdiv(R, 128)
        padded = program // tiles_down * 4  # a column of tiles, of the one group it belongs to
        start, column_end, padded_start, padded_end = group_of_row(offs_ptr, G, padded, 4, 0, 32)
        first_row = program % tiles_down * 128
        first_column = start + padded - padded_start
        # zeros after the last group are tiles like any other, in the order of their columns
        across = tl.where(column_end < 0, 1, (padded_end - padded_start) // 4)
        in_group = tl.where(column_end < 0, 0, (padded - padded_start) // 4)
        begin = tl.where(column_end < 0, padded, padded_start)
        place = begin.to(tl.int64) // 4 * tiles_down + (program % tiles_down) * across + in_group
    else:
        across = tl.cdiv(C, 4)
        padded = program // across * 128
        first_column = program % across * 4
        if offs_ptr is None:
            group_padded = tl.cdiv(GROUP_ROWS, 128) * 128
            group = padded // group_padded
            first_row = group * GROUP_ROWS + padded % group_padded
            row_end = (group + 1) * GROUP_ROWS
        else:
            start, row_end, padded_start, _ = group_of_row(offs_ptr, G, padded, 128, 0, 1)
            first_row = start + padded - padded_start

    byte = tl.arange(0, 512)
    rows = first_row + byte // 16 + byte % 16 // 4 * 32
    columns = first_column + byte % 4
    inside = (rows < row_end) & (columns < column_end)
    codes = tl.load(scales_ptr + rows.to(tl.int64) * C + columns, mask=inside, other=0)
    tl.store(blocked_ptr + place * 512 + byte, codes)


def reference_tiles(codes: Tensor) -> Tensor:
    """One matrix of uint8 codes, ``(R, C)`` -> its tiles, ``(R128*C4,)``."""
    R, C = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -C % COLUMNS, 0, -R % ROWS))
    tiles = padded.view(-(-R // ROWS), 4, 32, -(-C // COLUMNS), COLUMNS)  # (down, r // 32, r % 32, across, c)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def reference_filled(blocked: Tensor, matrices: list[Tensor]) -> Tensor:
    """``blocked`` with the tiles of all matrices one after the other, then zeros."""
    tiles = torch.cat([reference_tiles(matrix) for matrix in matrices])
    blocked.zero_().view(-1)[: len(tiles)] = tiles
    return blocked


def _up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _define(
    schema: str, shape_of: Callable[..., tuple[int, ...]], matrices_of: Callable[..., list[Tensor]]
) -> Callable[..., Tensor]:
    """An operator, of codes and where it has groups ``offs``: its arguments -> the result's shape, and its matrices."""

    def empty(codes: Tensor, *offs: Tensor) -> Tensor:
        return codes.new_empty(shape_of(codes, *offs))

    def launch(codes: Tensor, *offs: Tensor) -> Tensor:
        blocked = empty(codes, *offs)
        *experts, R, C = codes.shape
        sizes = (experts[0] * R, C, experts[0], R) if experts else (R, C, len(offs[0]), 0)
        if programs := blocked.numel() // (ROWS * COLUMNS):
            by_columns = matrices_of is column_groups
            blocked_kernel[(programs,)](codes, offs[0] if offs else None, blocked, *sizes, by_columns, num_warps=4)
        return blocked

    def reference(codes: Tensor, *offs: Tensor) -> Tensor:
        return reference_filled(empty(codes, *offs), matrices_of(codes, *offs))

    operator = define(schema, launch, launch if interpreter.INTERPRETED else reference, empty)

    def of(scales: Tensor, *offs: Tensor) -> Tensor:
        if scales.dim() != (dims := 2 if offs else 3):
            raise ValueError(f"scales has shape {tuple(scales.shape)}, wanted {dims} dimensions")
        if scales.dtype != torch.float8_e8m0fnu:
            raise ValueError(f"scales is {scales.dtype}, wanted torch.float8_e8m0fnu")
        if not scales.is_contiguous():
            raise ValueError(f"scales has strides {scales.stride()}, wanted row-major")
        blocked: Tensor = operator(scales.view(torch.uint8), *offs)
        return blocked.view(torch.float8_e8m0fnu)

    return of


def row_groups(codes: Tensor, offs: Tensor) -> list[Tensor]:
    """The codes of each group of rows; reads ``offs`` on the host."""
    return list(codes.tensor_split(offs.tolist())[:-1])


def column_groups(codes: Tensor, offs: Tensor) -> list[Tensor]:
    """Likewise of columns, of which one stands for 32 rows of ``offs``."""
    return [group.t() for group in row_groups(codes.t(), offs // MX_BLOCK)]


of_row_groups = _define(
    "mx_block_row_groups(Tensor codes, Tensor offs) -> Tensor",
    lambda codes, offs: (_up(codes.shape[0] + (ROWS - 1) * offs.shape[0], ROWS), _up(codes.shape[1], COLUMNS)),
    row_groups,
)
"""``(M, C)`` scales of rows in groups, and ``offs`` -> ``(P, C4)``; launches once.

Raises ValueError, before any launch, unless the scales are row-major float8_e8m0fnu of two dimensions.
"""

of_column_groups = _define(
    "mx_block_column_groups(Tensor codes, Tensor offs) -> Tensor",
    lambda codes, offs: (_up(codes.shape[0], ROWS), _up(codes.shape[1] + (COLUMNS - 1) * offs.shape[0], COLUMNS)),
    column_groups,
)
"""Likewise ``(R, C)`` scales of columns in groups -> ``(R128, P)``; sizes of groups must be multiples of 32 rows."""

of_experts = _define(
    "mx_block_experts(Tensor codes) -> Tensor",
    lambda codes: (codes.shape[0], _up(codes.shape[1], ROWS) * _up(codes.shape[2], COLUMNS)),
    list,
)
"""Likewise ``(E, R, C)`` scales of each expert -> ``(E, R128*C4)``."""
