"""Tiles of a grouped GEMM: which tile a persistent program works on, and what all programs do to one.

A launch has PROGRAMS programs a multiprocessor, whatever the sizes are; program p works on tiles p, p + programs and so
on. Tiles of a group follow each other, in bands of BAND row tiles: down a band first, then across, so that what the
programs read at one time is in L2. No value of ``offs`` is read on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import interpreter

__all__ = [
    "Extents",
    "extents",
    "groups_constant",
    "in_bands",
    "kernel_options",
    "multiprocessors",
    "one_of",
    "padded_extents",
    "piece",
    "programs",
    "scaled",
    "store_masked",
]

interpreter.install()

MOST_GROUPS = 4096
"""A program holds the ends of all groups in registers."""

LEAST_GROUPS_CONSTANT = 256
"""Of fewer groups the vector of ends is no faster, and each length has a binary of its own. So what is checked on small
problems is the binary that is timed."""


class Extents(NamedTuple):
    """The rows of all groups, a vector of each: group g has rows [start, end)."""

    group: tl.tensor
    start: tl.tensor
    end: tl.tensor


@triton.jit
def extents(offs_ptr: tl.tensor, M: tl.tensor, G: tl.tensor, GROUPS: tl.constexpr) -> Extents:
    """The extents of G groups, then of the rows past the last one as group G, then of groups without a row."""
    group = tl.arange(0, GROUPS)
    end = tl.load(offs_ptr + group, mask=group < G, other=M)
    start = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group <= G), other=0)
    start = tl.where(group <= G, start, M)
    end = tl.minimum(end, M)
    return Extents(group, tl.minimum(start, end), end)


@triton.jit
def padded_extents(
    offs_ptr: tl.tensor, M: tl.tensor, G: tl.tensor, GROUPS: tl.constexpr, ALIGNMENT: tl.constexpr
) -> Extents:
    """The extents of groups that begin at multiples of ALIGNMENT rows, each with its rows alone: without those that
    follow it up to the next group. With ALIGNMENT 1 they are those of ``offs``."""
    group, start, end = extents(offs_ptr, M, G, GROUPS)
    if ALIGNMENT > 1:
        size = tl.where(group < G, end - start, 0)
        padded = tl.where(group < G, tl.maximum(tl.cdiv(size, ALIGNMENT), 1) * ALIGNMENT, 0)
        start = tl.cumsum(padded, 0) - padded
        end = start + size
    return Extents(group, start, end)


@triton.jit
def one_of(values: tl.tensor, is_mine: tl.tensor) -> tl.tensor:
    """The element of a vector where a mask is set, which is so once."""
    return tl.sum(tl.where(is_mine, values, 0), 0)


@triton.jit
def in_bands(tile: tl.tensor, down: tl.tensor, across: tl.tensor, BAND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The row tile and the column tile of a tile among ``down * across``, in bands of BAND row tiles."""
    band = tile // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    inside = tile - band * BAND * across
    return band * BAND + inside % height, inside // height


@triton.jit
def piece(
    ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_end: tl.tensor,
    column_end: tl.tensor,
) -> tl.tensor:
    """A piece of a row-major matrix by pointers, zero past its ends."""
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(at, mask=(rows < row_end)[:, None] & (columns < column_end)[None, :], other=0.0)


@triton.jit
def store_masked(
    ptr: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_end: tl.tensor,
    column_end: tl.tensor,
    values: tl.tensor,
) -> None:
    """Store a piece of a row-major matrix by pointers, up to its ends."""
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, values, mask=(rows < row_end)[:, None] & (columns < column_end)[None, :])


@triton.jit
def scaled(
    total: tl.tensor,
    scale_a_ptr: tl.tensor,
    rows: tl.tensor,
    row_end: tl.tensor,
    scale_b_ptr: tl.tensor,
    columns: tl.tensor,
    column_end: tl.tensor,
) -> tl.tensor:
    """A tile divided by a scale a row and a scale a column."""
    scale_a = tl.load(scale_a_ptr + rows, mask=rows < row_end, other=1.0)
    scale_b = tl.load(scale_b_ptr + columns, mask=columns < column_end, other=1.0)
    return total * _reciprocal(scale_a)[:, None] * _reciprocal(scale_b)[None, :]


@triton.jit
def _reciprocal(scale: tl.tensor) -> tl.tensor:
    """1 / scale, rounded as torch rounds it: Triton's ``/`` may be two units in the last place off."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


def groups_constant(groups: int) -> int:
    """GROUPS of a launch: a power of two above the number of groups. Raises ValueError for more than 4,095 groups."""
    if groups >= MOST_GROUPS:
        raise ValueError(f"offs has {groups} groups, wanted fewer than {MOST_GROUPS}: a program holds all their ends")
    return max(LEAST_GROUPS_CONSTANT, 1 << groups.bit_length())


def programs(config: Mapping[str, int], device: torch.device) -> int:
    """Programs to launch: PROGRAMS a multiprocessor."""
    return config["PROGRAMS"] * multiprocessors(device)


def multiprocessors(device: torch.device) -> int:
    """SMs or CUs; on a CPU 2, so that a program of the interpreter has several tiles. Meta tensors are compiled for."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2


def kernel_options(config: Mapping[str, int]) -> dict[str, int]:
    """What a config says to the kernel and its compiler: all but PROGRAMS."""
    return {name: value for name, value in config.items() if name != "PROGRAMS"}
