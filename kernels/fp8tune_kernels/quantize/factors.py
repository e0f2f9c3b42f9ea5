"""Scales of codes that are folded into another operand: the factor of values.

    factor(scale) = 2 ** -floor(log2(scale));  2 ** 127 of 0 and of what is subnormal;  0 of an infinity and of NaN

The reciprocal by the exponent alone: exact of a power of two, which folded scales are. A scale is 0 where its slice has
an infinity, and NaN where it has a NaN: its codes then have a NaN of their own, and so has each sum that they enter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..spec import Problem


@triton.jit
def factor_of(scale: tl.tensor) -> tl.tensor:
    """The factor of a scale, float32 -> float32."""
    exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)


def reference_factor(scale: Tensor) -> Tensor:
    """:func:`factor_of` in torch."""
    exponent = (scale.view(torch.int32) >> 23) & 0xFF
    return ((254 - exponent).clamp(min=0) << 23).view(torch.float32)


def random_powers(problem: Problem, shape: tuple[int, ...], device: str, least: int, most: int) -> Tensor:
    """Powers of two, float32, with exponents from ``least`` to ``most``."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, device=device)
    generator = torch.Generator(device).manual_seed(problem.seed + 1)
    return torch.exp2(torch.randint(least, most + 1, shape, device=device, generator=generator).float())
