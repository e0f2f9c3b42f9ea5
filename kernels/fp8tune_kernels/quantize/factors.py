"""Scales of codes that are folded into another operand: what they divide, and how rows of a group come to have one.

*A factor* of a scale is its reciprocal by the exponent alone: exact of a power of two, which folded scales are.

    factor(scale) = 2 ** -floor(log2(scale));  2 ** 127 of 0 and of what is subnormal;  0 of an infinity and of NaN

A scale is 0 where its slice has an infinity, and NaN where it has a NaN: the codes that it belongs to then have a NaN
of their own, and so has each sum that they enter.

*Shifts* of rows bring rows that have scales of their own to the one of their group. For a row m of group g, with
``product[m] = scales[m] * other_scales[m]`` in float32:

    least[g] = min over rows m of group g of product[m], of those that are finite and positive; 1 if none is
    shift[m] = least[g] / product[m], rounded to nearest; 1 in rows of no group

No shift of such a row is above 1: codes that are multiplied by it never overflow, and lose bits where they become
subnormal. A row weighs as little in a sum over the group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8tune_kernels import interpreter
from fp8tune_kernels.runtime.checks import check_ends, check_offsets
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import define
from fp8tune_kernels.spec import Problem

__all__ = ["check_scales", "factor_of", "random_powers", "reference_factor", "shifts_of_rows"]

SHIFTS = {"BLOCK_SIZE": 4096, "num_warps": 8}
"""Rows that a program looks at together: 131,072 of one group are 32 times."""


@triton.jit
def factor_of(scale: tl.tensor) -> tl.tensor:
    """The factor of a scale, float32 -> float32."""
    exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)


def reference_factor(scale: Tensor) -> Tensor:
    """:func:`factor_of` in torch."""
    exponent = (scale.view(torch.int32) >> 23) & 0xFF
    return ((254 - exponent).clamp(min=0) << 23).view(torch.float32)


def check_scales(name: str, scales: Tensor, count: int, device: torch.device) -> None:
    """Raise ValueError unless ``scales`` are so many contiguous values of float32 on a device."""
    if scales.dtype != torch.float32 or scales.numel() != count or not scales.is_contiguous():
        given = f"{scales.dtype} of shape {tuple(scales.shape)} and strides {scales.stride()}"
        raise ValueError(f"{name} is {given}, wanted {count} contiguous values of torch.float32")
    if scales.device != device:
        raise ValueError(f"{name} is on {scales.device}, wanted {device}")


def random_powers(problem: Problem, shape: tuple[int, ...], device: str, least: int, most: int) -> Tensor:
    """Powers of two, float32, with exponents from ``least`` to ``most``."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, device=device)
    generator = torch.Generator(device).manual_seed(problem.seed + 1)
    return torch.exp2(torch.randint(least, most + 1, shape, device=device, generator=generator).float())


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def shifts_kernel(
    scales_ptr: tl.tensor,  # (M,)
    other_ptr: tl.tensor,  # (M,)
    offs_ptr: tl.tensor,  # (G,)
    shifts_ptr: tl.tensor,  # (M,)
    least_ptr: tl.tensor,  # (G,)
    M: tl.tensor,
    G: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """One program: a group, or the rows of none."""
    group = tl.program_id(0)
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group, mask=group < G, other=M)
    lanes = tl.arange(0, BLOCK_SIZE)
    least = tl.full((BLOCK_SIZE,), float("inf"), tl.float32)
    for row in tl.range(start, tl.where(group < G, end, start), BLOCK_SIZE, num_stages=1):
        product = _product(scales_ptr, other_ptr, row + lanes, end)
        least = tl.where((product > 0) & (product < least), product, least)
    smallest = tl.min(least, 0)
    smallest = tl.where(smallest < float("inf"), smallest, 1.0)
    tl.store(least_ptr + group, smallest, mask=group < G)
    for row in tl.range(start, end, BLOCK_SIZE, num_stages=1):
        product = _product(scales_ptr, other_ptr, row + lanes, end)
        shift = tl.div_rn(tl.full((BLOCK_SIZE,), 0.0, tl.float32) + smallest, product)
        shift = tl.where(group < G, shift, 1.0)
        tl.store(shifts_ptr + row + lanes, shift, mask=row + lanes < end)


@triton.jit
def _product(scales_ptr: tl.tensor, other_ptr: tl.tensor, rows: tl.tensor, end: tl.tensor) -> tl.tensor:
    inside = rows < end
    return tl.load(scales_ptr + rows, mask=inside, other=0.0) * tl.load(other_ptr + rows, mask=inside, other=0.0)


def shifts_of_rows(scales: Tensor, other_scales: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """``(shifts, least)``, (M,) and (G,), float32; ``scales`` and ``other_scales`` have M contiguous values each."""
    return _shifts(scales, other_scales, offs)


def _outputs(scales: Tensor, other_scales: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    M = scales.numel()
    check_offsets(offs, scales.device, "scales")
    check_scales("scales", scales, M, scales.device)
    check_scales("other_scales", other_scales, M, scales.device)
    return scales.new_empty(M), scales.new_empty(offs.shape[0])


def _launch(scales: Tensor, other_scales: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    shifts, least = _outputs(scales, other_scales, offs)
    if offs.is_cpu:
        check_ends(offs, scales.numel())
    tensors = (scales, other_scales, offs, shifts, least)
    launch_kernel(shifts_kernel, offs.shape[0] + 1, tensors, (scales.numel(), offs.shape[0]), (), SHIFTS)
    return shifts, least


def reference_shifts(scales: Tensor, other_scales: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`shifts_of_rows` in plain torch; reads ``offs`` on the host."""
    shifts, least = _outputs(scales, other_scales, offs)
    check_ends(offs, scales.numel())
    product = scales.reshape(-1) * other_scales.reshape(-1)
    shifts.fill_(1.0)
    start = 0
    for group, end in enumerate(offs.tolist()):
        rows = product[start:end]
        usable = rows[(rows > 0) & rows.isfinite()]
        least[group] = usable.min() if usable.numel() else 1.0
        shifts[start:end] = least[group].expand(len(rows)) / rows
        start = end
    return shifts, least


_shifts: Callable[..., tuple[Tensor, Tensor]] = define(
    "shifts_of_rows(Tensor scales, Tensor other_scales, Tensor offs) -> (Tensor, Tensor)",
    _launch,
    _launch if interpreter.INTERPRETED else reference_shifts,
    _outputs,
    makes_codes=True,
)
