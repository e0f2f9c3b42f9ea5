"""Token groups of any size, padded to a multiple of 16 (or of any alignment) rows and back, on the device.

    P = M + alignment*G, rounded up to a multiple of the alignment: enough for any routing
    padded_end[g] = padded_end[g - 1] + size[g] rounded up to a multiple of the alignment, and at least one

    x       (M, K), row-major, bfloat16, float16 or float32: rows of group after group
    offs    (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    padded  (P, K), row-major: every group followed by rows of zeros, and zeros after the last one

A grouped GEMM that contracts over rows needs groups that start at 16 bytes, of FP8 at multiples of 16 rows, and that
are not empty: CUTLASS asserts both on the device. P is an upper bound, so that nobody waits for the device. Both
directions are one launch, and each is the other's gradient. Rows past ``offs[-1]`` are not copied, and come back as
zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import interpreter
from ..groups import padded_rows
from ..runtime.checks import check_ends, check_matrix, check_offsets
from ..runtime.launching import launch_kernel
from ..runtime.ops import define

__all__ = [
    "group_of_row",
    "multiply_padded",
    "pad",
    "padded_ends",
    "padded_rows",
    "unpad",
    "zero_empty_groups",
    "zero_rows",
]

CONFIG = {"BLOCK_SIZE": 512, "num_warps": 4}
"""Columns a program copies, of ALIGNMENT rows: four accesses of 16 bytes a thread at 16 rows of bfloat16."""

ZEROS = {"BLOCK_SIZE": 4096, "num_warps": 4}
PROGRAMS = 132
"""Of a kernel that most often has nothing to do: an H200's multiprocessors."""


@triton.jit
def padded_size(size: tl.tensor, ALIGNMENT: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Rows of a group once it is padded: a multiple of ALIGNMENT, at least LEAST of those."""
    return tl.maximum(tl.cdiv(size, ALIGNMENT), LEAST) * ALIGNMENT


@triton.jit
def group_of_row(
    offs_ptr: tl.tensor, G: tl.tensor, row: tl.tensor, ALIGNMENT: tl.constexpr, LEAST: tl.constexpr, UNIT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of the group that owns padded ``row``, a multiple of ALIGNMENT: its start and end, and its padded start and end.

    Offsets are given in UNITs of a row. The padded ends up to ``row`` are those of the groups before, and ends never
    decrease: the largest of them is where this group starts. After the last group, both ends are -1.
    """
    start, padded_start, end, padded_end, total = 0, 0, 0x7FFFFFFF, 0x7FFFFFFF, 0
    for first in range(0, G, 128):
        groups = first + tl.arange(0, 128)
        ends = tl.load(offs_ptr + groups, mask=groups < G, other=0) // UNIT
        starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < G), other=0) // UNIT
        sizes = padded_size(ends - starts, ALIGNMENT, LEAST)
        padded_ends = total + tl.cumsum(sizes, 0)
        before = (groups < G) & (padded_ends <= row)
        after = (groups < G) & (padded_ends > row)
        start = tl.maximum(start, tl.max(tl.where(before, ends, 0), 0))
        padded_start = tl.maximum(padded_start, tl.max(tl.where(before, padded_ends, 0), 0))
        end = tl.minimum(end, tl.min(tl.where(after, ends, 0x7FFFFFFF), 0))
        padded_end = tl.minimum(padded_end, tl.min(tl.where(after, padded_ends, 0x7FFFFFFF), 0))
        total += tl.sum(sizes, 0)
    owned = padded_end != 0x7FFFFFFF
    return start, tl.where(owned, end, -1), padded_start, tl.where(owned, padded_end, -1)


@triton.jit
def tile_of(
    offs_ptr: tl.tensor, K: tl.tensor, G: tl.tensor, ALIGNMENT: tl.constexpr, BLOCK_SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of a program's ALIGNMENT padded rows, all of one group or of none, and its BLOCK_SIZE columns: the rows before
    padding and where their group ends, places before and after padding, and which columns exist."""
    blocks = tl.cdiv(K, BLOCK_SIZE)
    row = tl.program_id(0) // blocks * ALIGNMENT
    start, end, padded_start, _ = group_of_row(offs_ptr, G, row, ALIGNMENT, 1, 1)
    columns = tl.program_id(0) % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    lanes = tl.arange(0, ALIGNMENT)
    rows = row - padded_start + start + lanes
    places = rows.to(tl.int64)[:, None] * K + columns[None, :]
    padded_places = (row + lanes).to(tl.int64)[:, None] * K + columns[None, :]
    return rows, end, places, padded_places, (columns < K)[None, :]


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def pad_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    padded_ptr: tl.tensor,  # (P, K), row-major
    padded_offs_ptr: tl.tensor,  # (G,)
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    ALIGNMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """One program: ALIGNMENT padded rows, all of one group or of none, and BLOCK_SIZE columns. The first programs also
    store where the padded groups end."""
    rows, end, places, padded_places, in_columns = tile_of(offs_ptr, K, G, ALIGNMENT, BLOCK_SIZE)
    x = tl.load(x_ptr + places, mask=(rows < end)[:, None] & in_columns, other=0.0)
    tl.store(padded_ptr + padded_places, x, mask=in_columns)
    if tl.program_id(0) == 0:
        store_padded_ends(offs_ptr, padded_offs_ptr, G, ALIGNMENT)


@triton.jit
def store_padded_ends(offs_ptr: tl.tensor, padded_offs_ptr: tl.tensor, G: tl.tensor, ALIGNMENT: tl.constexpr) -> None:
    """The padded end of every group, by one program."""
    total = 0
    for first in range(0, G, 128):
        groups = first + tl.arange(0, 128)
        ends = tl.load(offs_ptr + groups, mask=groups < G, other=0)
        starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < G), other=0)
        sizes = padded_size(ends - starts, ALIGNMENT, 1)
        tl.store(padded_offs_ptr + groups, total + tl.cumsum(sizes, 0), mask=groups < G)
        total += tl.sum(sizes, 0)


@triton.jit(do_not_specialize=["M", "G"])
def unpad_kernel(
    padded_ptr: tl.tensor,  # (P, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    x_ptr: tl.tensor,  # (M, K), row-major
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    ALIGNMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """One program: ALIGNMENT padded rows and BLOCK_SIZE columns. What follows the last padded group is at least as many
    rows as x has past its last group: those programs write its zeros."""
    rows, end, places, padded_places, in_columns = tile_of(offs_ptr, K, G, ALIGNMENT, BLOCK_SIZE)
    padded = tl.load(padded_ptr + padded_places, mask=(rows < end)[:, None] & in_columns, other=0.0)
    tl.store(x_ptr + places, padded, mask=(rows < tl.where(end < 0, M, end))[:, None] & in_columns)


@triton.jit(do_not_specialize=["G"])
def padded_ends_kernel(
    offs_ptr: tl.tensor,  # (G,)
    padded_offs_ptr: tl.tensor,  # (G,)
    G: tl.tensor,
    ALIGNMENT: tl.constexpr,
) -> None:
    """One program."""
    store_padded_ends(offs_ptr, padded_offs_ptr, G, ALIGNMENT)


@triton.jit(do_not_specialize=["M", "G"])
def zero_rows_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Blocks of elements past the last group, shared among the programs."""
    first = tl.load(offs_ptr + G - 1)
    x_ptr += first.to(tl.int64) * K
    count = (M - first).to(tl.int64) * K
    for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_SIZE), tl.num_programs(0)):
        places = block.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        tl.store(x_ptr + places, tl.zeros((BLOCK_SIZE,), x_ptr.dtype.element_ty), mask=places < count)


@triton.jit(do_not_specialize=["G"])
def zero_empty_groups_kernel(
    x_ptr: tl.tensor,  # (G, N, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    N: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """A group's blocks, shared among every G-th program; nothing where the group has rows."""
    group = tl.program_id(0) % G
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    if tl.load(offs_ptr + group) <= start:
        count = tl.cast(N, tl.int64) * K
        x_ptr += group * count
        for block in tl.range(tl.program_id(0) // G, tl.cdiv(count, BLOCK_SIZE), tl.num_programs(0) // G):
            places = block.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            tl.store(x_ptr + places, tl.zeros((BLOCK_SIZE,), x_ptr.dtype.element_ty), mask=places < count)


def padded_ends(offs: Tensor, alignment: int) -> Tensor:
    """The padded end of every group, on the device. Tensors are checked by the caller, here and below."""
    ends = torch.empty_like(offs)
    launch_kernel(padded_ends_kernel, 1, (offs, ends), (offs.shape[0],), (alignment,), {"num_warps": 4})
    return ends


def zero_rows(x: Tensor, offs: Tensor) -> None:
    """Write zeros into the rows of ``x`` past the last group, which are few: PROGRAMS programs, whatever M is."""
    sizes = *x.shape, offs.shape[0]
    launch_kernel(zero_rows_kernel, PROGRAMS, (x, offs), sizes, (), ZEROS)


def zero_empty_groups(x: Tensor, offs: Tensor) -> None:
    """Write zeros into ``x``, (G, N, K), where a group has no row."""
    G, N, K = x.shape
    launch_kernel(zero_empty_groups_kernel, 16 * G, (x, offs), (N, K, G), (), ZEROS)


def pad(x: Tensor, offs: Tensor, alignment: int = 16) -> tuple[Tensor, Tensor]:
    """Pad each group of rows of ``x`` to a multiple of ``alignment``, a power of two: ``(padded, padded_offs)``.

    Differentiable. A GPU does not check the values in ``offs``. Raises ValueError, before any launch, for a wrong
    dtype, rank, stride or device of ``x`` or ``offs``.
    """
    return _pad(x, offs, alignment)


def unpad(padded: Tensor, offs: Tensor, M: int, alignment: int = 16) -> Tensor:
    """The inverse of :func:`pad`: ``(P, K)`` -> ``(M, K)``; ``offs`` and M are those of the rows before padding.

    Raises ValueError as it does, and for a number of rows other than :func:`padded_rows`.
    """
    return _unpad(padded, offs, M, alignment)


def multiply_padded(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, offs: Tensor, alignment: int) -> Tensor:
    """``multiply(x, offs)`` with each group of rows padded for it, and the padding taken out of the product."""
    product = multiply(*pad(x, offs, alignment))
    return unpad(product, offs, x.shape[0], alignment)


def _outputs_of_pad(x: Tensor, offs: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    return x.new_empty(padded_rows(x.shape[0], offs.shape[0], alignment), x.shape[1]), torch.empty_like(offs)


def _outputs_of_unpad(padded: Tensor, offs: Tensor, M: int, alignment: int) -> Tensor:
    check_matrix("padded", padded)
    check_offsets(offs, padded.device)
    if padded.shape[0] != (wanted := padded_rows(M, offs.shape[0], alignment)):
        raise ValueError(f"padded has {padded.shape[0]} rows, wanted {wanted}: {M} rows in {offs.shape[0]} groups")
    return padded.new_empty(M, padded.shape[1])


def _launch_pad(x: Tensor, offs: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    padded, padded_offs = _outputs_of_pad(x, offs, alignment)
    _launch(pad_kernel, (x, offs, padded, padded_offs), (*x.shape, len(offs)), len(padded), alignment)
    return padded, padded_offs


def _launch_unpad(padded: Tensor, offs: Tensor, M: int, alignment: int) -> Tensor:
    x = _outputs_of_unpad(padded, offs, M, alignment)
    _launch(unpad_kernel, (padded, offs, x), (*x.shape, len(offs)), len(padded), alignment)
    return x


def _launch(kernel: Any, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], rows: int, alignment: int) -> None:
    if tensors[1].is_cpu:
        check_ends(tensors[1], sizes[0])
    programs = rows // alignment * max(1, -(-sizes[1] // CONFIG["BLOCK_SIZE"]))  # without columns: the padded ends
    launch_kernel(kernel, programs, tensors, sizes, (alignment,), CONFIG)


def reference_pad(x: Tensor, offs: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """:func:`pad` in plain torch; reads ``offs`` on the host."""
    padded, padded_offs = _outputs_of_pad(x, offs, alignment)
    check_ends(offs, len(x))
    places, ends = _places(offs, alignment)
    padded.zero_()[places] = x[: len(places)]
    return padded, padded_offs.copy_(ends)


def reference_unpad(padded: Tensor, offs: Tensor, M: int, alignment: int) -> Tensor:
    """:func:`unpad` in plain torch; reads ``offs`` on the host."""
    x = _outputs_of_unpad(padded, offs, M, alignment).zero_()
    check_ends(offs, M)
    places, _ = _places(offs, alignment)
    x[: len(places)] = padded[places]
    return x


def _places(offs: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """The padded row of each row that has a group, and the padded end of each group."""
    sizes = offs.diff(prepend=offs.new_zeros(1))
    padded_sizes = ((sizes + alignment - 1) // alignment).clamp(min=1) * alignment
    padded_ends = padded_sizes.cumsum(0)
    moved_by = (padded_ends - padded_sizes) - (offs - sizes)
    return torch.arange(int(offs[-1]), device=offs.device) + moved_by.repeat_interleave(sizes), padded_ends


def _remember_pad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, offs, ctx.alignment = inputs
    ctx.save_for_backward(offs)
    ctx.M = x.shape[0]
    ctx.mark_non_differentiable(output[1])


def _backward_of_pad(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
    (offs,) = ctx.saved_tensors
    return unpad(grad.contiguous(), offs, ctx.M, ctx.alignment), None, None


def _remember_unpad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offs, _, ctx.alignment = inputs
    ctx.save_for_backward(offs)


def _backward_of_unpad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (offs,) = ctx.saved_tensors
    return pad(grad.contiguous(), offs, ctx.alignment)[0], None, None, None


_pad: Callable[..., tuple[Tensor, Tensor]] = define(
    "pad_token_groups(Tensor x, Tensor offs, int alignment) -> (Tensor, Tensor)",
    _launch_pad,
    _launch_pad if interpreter.INTERPRETED else reference_pad,
    _outputs_of_pad,
    gradient=(_backward_of_pad, _remember_pad),
)
_unpad: Callable[..., Tensor] = define(
    "unpad_token_groups(Tensor padded, Tensor offs, SymInt M, int alignment) -> Tensor",
    _launch_unpad,
    _launch_unpad if interpreter.INTERPRETED else reference_unpad,
    _outputs_of_unpad,
    gradient=(_backward_of_unpad, _remember_unpad),
)
