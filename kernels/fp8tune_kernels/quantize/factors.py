"""Scales of one operand that are folded into the cast of the other: they divide its values before these have a scale.

    y = float32(x) * float32(1 / scale)          both rounded to nearest

Exact where scales are powers of two and y is in the range of float32: else it is infinite, subnormal or zero. A scale
of 0, which an infinity has, divides into infinities, and into NaN where x is 0; that of a NaN is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8tune_kernels.spec import Problem

__all__ = ["check_factors", "divided", "random_factors", "reciprocal", "restore_factors"]


@triton.jit
def reciprocal(scale: tl.tensor) -> tl.tensor:
    """1 / scale, rounded to nearest: Triton's ``/`` may be two units in the last place off."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


def divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y in torch; ``scale`` broadcasts against ``x``."""
    return x.float() * scale.reciprocal()


def check_factors(name: str, scales: torch.Tensor, count: int, device: torch.device) -> None:
    """Raise ValueError unless ``scales`` are so many contiguous values of float32 on a device."""
    if scales.dtype != torch.float32 or scales.numel() != count or not scales.is_contiguous():
        given = f"{scales.dtype} of shape {tuple(scales.shape)} and strides {scales.stride()}"
        raise ValueError(f"{name} is {given}, wanted {count} contiguous values of torch.float32")
    if scales.device != device:
        raise ValueError(f"{name} is on {scales.device}, wanted {device} as x")


def random_factors(problem: Problem, shape: tuple[int, ...], device: str, number: int) -> torch.Tensor:
    """Powers of two from 1/64 to 64, float32; ``number``: which of a problem's."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, device=device)
    generator = torch.Generator(device).manual_seed(problem.seed + number)
    return torch.exp2(torch.randint(-6, 7, shape, device=device, generator=generator).float())


def restore_factors(*factors: torch.Tensor) -> None:
    """Write ones in place of zeros, negative values, infinities and NaN, which spread: what else was written is then
    seen in the codes. Their own effect is tested apart."""
    for each in factors:
        each[~(each.isfinite() & (each > 0))] = 1.0
