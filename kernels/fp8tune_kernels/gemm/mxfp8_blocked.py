"""E8M0 scales in the blocked layout that block-scaled GEMMs of sm_100 read, group by group, on the device.

Scales of a matrix, ``(R, C)``, are cut into tiles of 128 x 4, zeros where the matrix ends within one; tiles follow each
other row of tiles by row of tiles, and within a tile

    element (r, c) is byte (r % 32)*16 + (r // 32)*4 + c                 cuBLAS, "1D Block Scaling Factors Layout"

so that the four scales of rows r, r + 32, r + 64 and r + 96 lie side by side. Each group is a matrix of its own:

    of_row_groups      (M, C) + offs   ->  (P, C4)       groups of rows; P = M + 127*G, rounded up to 128
    of_column_groups   (R, C) + offs   ->  (R128, P)     groups of columns; P = C + 3*G, rounded up to 4
    of_experts         (E, R, C)       ->  (E, R128*C4)  groups of R rows each

R128 and C4 are rounded up to 128 and 4. ``offs`` counts rows of what was quantized, of which 32 are one column of
``of_column_groups``. How much of P is used only the device knows; zeros follow it. The shapes are what
``torch._scaled_grouped_mm`` checks, no more: groups begin where the one before ends, not at a row of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fp8tune_kernels import interpreter
from fp8tune_kernels.gemm.token_groups import group_of_row, on_its_device
from fp8tune_kernels.quantize.mxfp8_arithmetic import MX_BLOCK

__all__ = ["of_column_groups", "of_experts", "of_row_groups", "reference_tiles"]

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


def of_row_groups(scales: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``(M, C)`` scales of rows in groups -> ``(P, C4)``, as the module's docstring says; launches once.

    Raises ValueError, before any launch, unless ``scales`` is row-major float8_e8m0fnu of two dimensions.
    """
    _check(scales, 2)
    return _of_codes(torch.ops.fp8tune.mx_block_row_groups.default(scales.view(torch.uint8), offs))


def of_column_groups(scales: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``(R, C)`` scales of columns in groups -> ``(R128, P)``; sizes of groups must be multiples of 32 rows.

    Raises ValueError, before any launch, unless ``scales`` is row-major float8_e8m0fnu of two dimensions.
    """
    _check(scales, 2)
    return _of_codes(torch.ops.fp8tune.mx_block_column_groups.default(scales.view(torch.uint8), offs))


def of_experts(scales: torch.Tensor) -> torch.Tensor:
    """``(E, R, C)`` scales of each expert -> ``(E, R128*C4)``.

    Raises ValueError, before any launch, unless ``scales`` is row-major float8_e8m0fnu of three dimensions.
    """
    _check(scales, 3)
    return _of_codes(torch.ops.fp8tune.mx_block_experts.default(scales.view(torch.uint8)))


def _of_codes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e8m0fnu)


def _check(scales: torch.Tensor, dims: int) -> None:
    if scales.dim() != dims:
        raise ValueError(f"scales has shape {tuple(scales.shape)}, wanted {dims} dimensions")
    if scales.dtype != torch.float8_e8m0fnu:
        raise ValueError(f"scales is {scales.dtype}, wanted torch.float8_e8m0fnu")
    if not scales.is_contiguous():
        raise ValueError(f"scales has strides {scales.stride()}, wanted row-major")


def reference_tiles(codes: torch.Tensor) -> torch.Tensor:
    """One matrix of uint8 codes, ``(R, C)`` -> its tiles, ``(R128*C4,)``, in plain torch."""
    R, C = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -C % COLUMNS, 0, -R % ROWS))
    tiles = padded.view(-(-R // ROWS), 4, 32, -(-C // COLUMNS), COLUMNS)  # (down, r // 32, r % 32, across, c)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _empty_row_groups(codes: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    M, C = codes.shape
    return codes.new_empty(_up(M + (ROWS - 1) * offs.shape[0], ROWS), _up(C, COLUMNS))


def _empty_column_groups(codes: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    R, C = codes.shape
    return codes.new_empty(_up(R, ROWS), _up(C + (COLUMNS - 1) * offs.shape[0], COLUMNS))


def _empty_experts(codes: torch.Tensor) -> torch.Tensor:
    E, R, C = codes.shape
    return codes.new_empty(E, _up(R, ROWS) * _up(C, COLUMNS))


def _reference_row_groups(codes: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    ends = offs.tolist()
    groups = [codes[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return _filled(_empty_row_groups(codes, offs), groups)


def _reference_column_groups(codes: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    ends = (offs // MX_BLOCK).tolist()
    groups = [codes[:, start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return _filled(_empty_column_groups(codes, offs), groups)


def _reference_experts(codes: torch.Tensor) -> torch.Tensor:
    return _filled(_empty_experts(codes), list(codes))


def _filled(blocked: torch.Tensor, groups: list[torch.Tensor]) -> torch.Tensor:
    """The tiles of all groups one after the other, then zeros."""
    tiles = torch.cat([reference_tiles(group) for group in groups])
    blocked.zero_().view(-1)[: len(tiles)] = tiles
    return blocked


def _launch_row_groups(codes: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return _launch(codes, offs, _empty_row_groups(codes, offs), (*codes.shape, len(offs), 0), by_columns=False)


def _launch_column_groups(codes: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return _launch(codes, offs, _empty_column_groups(codes, offs), (*codes.shape, len(offs), 0), by_columns=True)


def _launch_experts(codes: torch.Tensor) -> torch.Tensor:
    E, R, C = codes.shape
    return _launch(codes, None, _empty_experts(codes), (E * R, C, E, R), by_columns=False)


def _launch(
    codes: torch.Tensor, offs: Any, blocked: torch.Tensor, sizes: tuple[int, ...], *, by_columns: bool
) -> torch.Tensor:
    if programs := blocked.numel() // (ROWS * COLUMNS):
        blocked_kernel[(programs,)](codes, offs, blocked, *sizes, by_columns, num_warps=4)
    return blocked


_LIBRARY = torch.library.Library("fp8tune", "FRAGMENT")


def _register(schema: str, launch: Any, reference: Any, fake: Any) -> None:
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, on_its_device(launch), "CUDA")
    _LIBRARY.impl(name, launch if interpreter.INTERPRETED else reference, "CPU")
    torch.library.register_fake(f"fp8tune::{name}", fake, lib=_LIBRARY)


_register(
    "mx_block_row_groups(Tensor codes, Tensor offs) -> Tensor",
    _launch_row_groups,
    _reference_row_groups,
    _empty_row_groups,
)
_register(
    "mx_block_column_groups(Tensor codes, Tensor offs) -> Tensor",
    _launch_column_groups,
    _reference_column_groups,
    _empty_column_groups,
)
_register("mx_block_experts(Tensor codes) -> Tensor", _launch_experts, _reference_experts, _empty_experts)
