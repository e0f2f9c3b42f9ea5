"""The arithmetic that every FP8 kernel shares, as Triton helpers and as the torch functions they are checked against.

    amax  = max |x| over the reduced axis
    scale = float32( float64(fp8_max) / max(float64(amax), 1e-12) )
    scale = scale with its mantissa bits cleared                        where scales are powers of two
    q     = fp8( clamp(float32(x) * scale, -fp8_max, fp8_max) )         round to nearest even

A maximum has no rounding and the division is done once a slice in float64, so every launch config and every backend
gives the same bytes. A NaN in a slice makes its amax, its scale and all its codes NaN. An infinity makes the scale 0:
finite values become zeros, infinities ``inf * 0``, a NaN. NaN is written as one code, :data:`NAN_CODES`, because
casts differ in its sign.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .. import interpreter

interpreter.install()

FP8_MAX = {dtype: float(torch.finfo(dtype).max) for dtype in interpreter.TORCH_DTYPES.values()}
"""The FP8 dtypes kernels write -> their largest finite value: 448, 240 and 57344."""

NAN_CODES = {torch.float8_e4m3fn: 0x7F, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2: 0x7F}
"""The byte that stands for NaN: what NVIDIA's conversion writes, and the only NaN of the fnuz format."""


@triton.jit
def magnitude(values: tl.tensor) -> tl.tensor:
    """|x| as an integer of the same width: the bits without the sign order like |x|, NaN above infinity."""
    if values.dtype.primitive_bitwidth == 16:
        return values.to(tl.int16, bitcast=True) & 0x7FFF
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def magnitude_to_float32(bits: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The inverse of :func:`magnitude` for values of ``dtype``; takes wider integers too, as ``tl.max`` gives them."""
    if dtype.primitive_bitwidth == 16:
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:  # noqa: RET505
        return bits.to(dtype, bitcast=True)


@triton.constexpr_function
def float32_bits(value: float) -> int:
    """The bits of a positive, normal float32, cut off after its mantissa: they order like the values.

    In plain arithmetic, because Triton 3.6 refuses a constexpr function that calls into ``struct``.
    """
    exponent = 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    while value < 1:
        value, exponent = value * 2, exponent - 1
    return (exponent + 127 << 23) + int((value - 1) * 2**23)


@triton.jit
def scale_of(amax: tl.tensor, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """amax, float32 -> scale, float32. A NaN stays NaN; an infinity gives 0."""
    if POWER_OF_TWO:
        return _power_of_two_scale(amax, FP8_MAX)
    else:  # noqa: RET505
        least = tl.full(amax.shape, 1e-12, tl.float64)  # a literal would be rounded to float32 first
        divisor = amax.to(tl.float64)
        # a comparison, not a maximum: it keeps NaN on every backend
        return (FP8_MAX / tl.where(divisor < least, least, divisor)).to(tl.float32)


@triton.jit
def _power_of_two_scale(amax: tl.tensor, FP8_MAX: tl.constexpr) -> tl.tensor:
    """2 ** floor(log2(fp8_max / max(amax, 1e-12))) from the bits, without a division.

    The difference of the bits has the difference of the exponents on top, less one where amax has the larger mantissa.
    The division in float32 never says otherwise: its quotient rounds to a power of two from below only within 2^-25 of
    it, and mantissas of 1.75 or 1.875 over the next larger one stay 2^-24 away. In float64, every thread of a tile
    repeated the division for its columns: a third of a transposing kernel's instructions on an H100.
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = float32_bits(FP8_MAX) - tl.maximum(bits, float32_bits(1e-12)) >> 23
    scale = (exponent + 127 << 23).to(tl.float32, bitcast=True)
    infinity: tl.constexpr = 0x7F800000
    return tl.where(bits < infinity, scale, tl.where(bits == infinity, 0.0, amax))


@triton.jit
def quantize(values: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, FP8_MAX: tl.constexpr) -> tl.tensor:
    """Values of any float dtype, times the scale of their own slice, cast to the FP8 ``dtype``.

    Nothing needs to be clamped: such a product exceeds fp8_max by two roundings of float32 at most, and rounds to it.
    """
    scaled = values.to(tl.float32) * scale
    return canonical_nan(scaled, scaled.to(dtype), FP8_MAX)


@triton.jit
def canonical_nan(scaled: tl.tensor, q: tl.tensor, FP8_MAX: tl.constexpr) -> tl.tensor:
    """The cast ``q`` of ``scaled`` with every NaN as the one code of :data:`NAN_CODES`.

    NVIDIA's conversion writes that code itself (PTX ISA, ``cvt``: the canonical NaN of the format), so that no element
    is tested there: with the test, a transposing kernel could not move its input by ``ldmatrix`` and took twice the
    instructions.
    """
    if is_cuda():
        return q
    else:  # noqa: RET505
        nan_code: tl.constexpr = 0x80 if FP8_MAX == 240.0 else 0x7F
        codes = q.to(tl.uint8, bitcast=True)
        return tl.where(scaled == scaled, codes, nan_code).to(tl.uint8).to(q.dtype, bitcast=True)


def reference_scale(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    """:func:`scale_of` in torch: float32 of any shape -> float32 of the same shape."""
    divisor = amax.double().clamp(min=1e-12)
    # full_like: torch computes `number / tensor` as a reciprocal times the number, one rounding too many
    scale = (torch.full_like(divisor, FP8_MAX[dtype]) / divisor).float()
    if not power_of_two:
        return scale
    cleared = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(scale.isnan(), scale, cleared)


def reference_cast(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """:func:`quantize` in torch; ``scale`` broadcasts against ``values``."""
    scaled = values.float() * scale
    codes = scaled.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype).view(torch.uint8)
    return codes.masked_fill_(scaled.isnan(), NAN_CODES[dtype]).view(dtype)
