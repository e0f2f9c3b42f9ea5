"""FP8 quantization one number at a time, from the formulas alone: what the torch references are checked against."""

import bisect
import math

import numpy as np

FORMATS = {"float8_e4m3fn": (3, 7, 0x7E), "float8_e4m3fnuz": (3, 8, 0x7F), "float8_e5m2": (2, 15, 0x7B)}
"""Mantissa bits, exponent bias, code of the largest finite value."""

NAN = {"float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2": 0x7F}


def decode(code: int, dtype: str) -> float:
    """The value of a code without sign, up to the largest finite one."""
    mantissa_bits, bias, _ = FORMATS[dtype]
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


VALUES = {dtype: [decode(code, dtype) for code in range(FORMATS[dtype][2] + 1)] for dtype in FORMATS}


def encode(value: float, dtype: str) -> int:
    """The code nearest to a value that is at most the largest finite one in size; ties go to the even code."""
    values = VALUES[dtype]
    if math.isnan(value):
        return NAN[dtype]
    above = bisect.bisect_left(values, abs(value))
    code = above
    if values[above] != abs(value):
        to_below, to_above = abs(value) - values[above - 1], values[above] - abs(value)  # both exact in float64
        nearer_below = to_below < to_above or (to_below == to_above and above % 2 == 1)
        code = above - 1 if nearer_below else above
    negative = math.copysign(1, value) < 0
    if dtype == "float8_e4m3fnuz" and code == 0:
        return 0  # the only zero it has
    return code | 0x80 if negative else code


def scale_of(values: list[float], dtype: str, power_of_two: bool) -> float:
    """The scale of one slice, as a float32 value."""
    if any(math.isnan(value) for value in values):
        return math.nan
    amax = max((abs(value) for value in values), default=0.0)
    scale = float(np.float32(VALUES[dtype][-1] / max(amax, 1e-12)))
    if power_of_two and scale > 0:
        scale = math.ldexp(1, math.frexp(scale)[1] - 1)
    return scale


def cast(value: float, scale: float, dtype: str) -> int:
    """The code of one value under a scale."""
    with np.errstate(all="ignore"):
        scaled = float(np.float32(value) * np.float32(scale))
    largest = VALUES[dtype][-1]
    return encode(scaled if math.isnan(scaled) else min(max(scaled, -largest), largest), dtype)


def quantize_slices(slices: list[list[float]], dtype: str, power_of_two: bool) -> tuple[list[list[int]], list[float]]:
    """Codes and scales of independent slices."""
    scales = [scale_of(values, dtype, power_of_two) for values in slices]
    codes = [[cast(value, scale, dtype) for value in values] for values, scale in zip(slices, scales, strict=True)]
    return codes, scales


def e8m0_of(block: list[float], dtype: str, scale_mode: str) -> int:
    """The E8M0 code of one block's scale."""
    if any(math.isnan(value) for value in block):
        return 255
    amax, largest = max(abs(value) for value in block), VALUES[dtype][-1]
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    if scale_mode == "floor":
        exponent = math.frexp(amax)[1] - math.frexp(largest)[1]
    else:
        exponent = next(power for power in range(-300, 300) if math.ldexp(largest, power) >= amax)
    return min(max(exponent, -127), 127) + 127


def quantize_blocks(values: list[float], dtype: str, scale_mode: str) -> tuple[list[int], list[int]]:
    """Codes, and an E8M0 code for every 32 of them, of values that follow one another in memory or down a column."""
    codes, scales, largest = [], [], VALUES[dtype][-1]
    for start in range(0, len(values), 32):
        block = values[start : start + 32]
        scales.append(e8m0_of(block, dtype, scale_mode))
        for value in block:
            scaled = math.nan if scales[-1] == 255 else math.ldexp(value, 127 - scales[-1])
            codes.append(encode(scaled if math.isnan(scaled) else min(max(scaled, -largest), largest), dtype))
    return codes, scales
