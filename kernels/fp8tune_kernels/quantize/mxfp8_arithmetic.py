"""The arithmetic of the MXFP8 kernels: one E8M0 scale a block of 32 elements, as Triton helpers and in torch.

    amax  = max |x| over the block
    scale = 2^(floor(log2(amax)) - emax)            mode ``floor``: fp8_max lies in [2^emax, 2^(emax + 1))
    scale = 2^ceil(log2(amax / fp8_max))            mode ``rceil``: the least scale under which nothing is clamped
    q     = fp8( clamp(x / scale, -fp8_max, fp8_max) )                              round to nearest even

E8M0 (OCP Microscaling Formats v1.0, section 5.4.1) is an exponent with a bias of 127: codes 0 to 254 are 2^-127 to
2^127, 255 is NaN; it has no zero, no sign and no infinity. ``floor`` is the conversion of section 6.3, ``rceil`` the
one NVIDIA's hardware rounds to. Exponents come from the bits of float32, never from a logarithm, and dividing by a
power of two rounds nothing that FP8 could hold: every config and every backend gives the same bytes.

Corners, where the specification leaves a choice or clamps:

- the exponent is clamped to E8M0's range: an all-zero block, or one whose amax is below 2^-127 times the scale's
  reach, has code 0; zeros keep their sign;
- a NaN makes the block NaN: code 255, and every element the one code of :data:`.arithmetic.NAN_CODES`
  (the scale alone says it, section 5.1);
- an infinity has no largest power of two below it: code 254. It is clamped to fp8_max, which times 2^127 is beyond
  float32, so what accumulates in float32 sees an infinity; finite neighbours are cast under the same scale;
- a last block of fewer than 32 elements is reduced over those that exist, as if zeros followed.

The element formats of the specification are e4m3 and e5m2. The same formulas serve e4m3fnuz, with its own fp8_max.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..runtime import declare
from ..runtime.declare import Call
from .arithmetic import FP8_MAX, canonical_nan, reference_cast

MX_BLOCK = 32
"""Elements that share a scale."""

SCALE_MODES = ("floor", "rceil")

FP8_MAX_BITS: dict[torch.dtype, int] = {
    dtype: struct.unpack("<i", struct.pack("<f", largest))[0] for dtype, largest in FP8_MAX.items()
}
"""The largest finite value of each FP8 dtype as the bits of a float32: what kernels derive exponents from."""


@triton.jit
def e8m0_of(amax: tl.tensor, FP8_MAX_BITS: tl.constexpr, RCEIL: tl.constexpr) -> tl.tensor:
    """amax, float32, not negative -> the code of its scale, int32 in 0..255.

    The bits of positive floats order and subtract like their logarithms, as far as whole exponents go.
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits - FP8_MAX_BITS + 0x7FFFFF) >> 23 if RCEIL else (bits >> 23) - (FP8_MAX_BITS >> 23)
    special = tl.where(bits == 0x7F800000, 254, 255)
    return tl.where(bits < 0x7F800000, tl.maximum(exponent + 127, 0), special)


@triton.jit
def quantize_block(values: tl.tensor, code: tl.tensor, dtype: tl.constexpr, FP8_MAX: tl.constexpr) -> tl.tensor:
    """Values of any float dtype, over the scale of an E8M0 code that broadcasts against them, as FP8 ``dtype``.

    Mode ``floor`` leaves values above fp8_max: NVIDIA's conversion clamps them, elsewhere it is done here.
    """
    scaled = values.to(tl.float32) * _reciprocal_of(code)
    if is_cuda():
        return scaled.to(dtype)
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        clamped = tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        return canonical_nan(scaled, clamped.to(dtype), FP8_MAX)


@triton.jit
def _reciprocal_of(code: tl.tensor) -> tl.tensor:
    """1 / scale of an E8M0 code, float32: exact, 2^-127 as the subnormal it is; NaN for 255."""
    bits = tl.maximum((254 - code) << 23, 0x400000)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


def reference_blocks(x: torch.Tensor, dtype: torch.dtype, scale_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize along the last dim in torch: ``(..., K)`` -> q ``(..., K)`` and scales ``(..., ceil(K / 32))``."""
    q, codes = reference_codes(x, dtype, scale_mode)
    return q, codes.view(torch.float8_e8m0fnu)


def reference_codes(x: torch.Tensor, dtype: torch.dtype, scale_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`reference_blocks` with scales as the uint8 they are in memory."""
    length = x.shape[-1]
    blocks = -(-length // MX_BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * MX_BLOCK - length)).unflatten(-1, (blocks, MX_BLOCK))
    codes = _reference_e8m0(padded.abs().amax(-1).float(), dtype, scale_mode)
    q = reference_cast(padded, _reference_reciprocal(codes)[..., None], dtype)
    return q.flatten(-2)[..., :length], codes.to(torch.uint8)


def _reference_e8m0(amax: torch.Tensor, dtype: torch.dtype, scale_mode: str) -> torch.Tensor:
    """:func:`e8m0_of` in torch."""
    bits, largest = amax.view(torch.int32), FP8_MAX_BITS[dtype]
    exponent = (bits - largest + 0x7FFFFF) >> 23 if scale_mode == "rceil" else (bits >> 23) - (largest >> 23)
    return (exponent + 127).clamp(min=0).masked_fill(amax.isinf(), 254).masked_fill(amax.isnan(), 255)


def _reference_reciprocal(codes: torch.Tensor) -> torch.Tensor:
    """1 / scale in torch; NaN for 255."""
    bits = ((254 - codes) << 23).clamp(min=0x400000)
    return bits.masked_fill(codes == 255, 0x7FC00000).view(torch.float32)


def check_scale_mode(scale_mode: str) -> None:
    """Raise ValueError for a name that is not in :data:`SCALE_MODES`."""
    if scale_mode not in SCALE_MODES:
        raise ValueError(f"scale_mode is {scale_mode!r}, wanted {' or '.join(SCALE_MODES)}")


SCALE_MODE = declare.Argument(
    "scale_mode", "str", check=check_scale_mode, random=lambda problem, device: problem.scale_mode
)


def launch_values(call: Call) -> dict[str, Any]:
    """Return what Triton functions take beside the arguments. Triton has no pointers to E8M0."""
    return {
        "scales": call.scales.view(torch.uint8),
        "FP8_MAX_BITS": FP8_MAX_BITS[call.float8_dtype],
        "RCEIL": call.scale_mode == "rceil",
    }


def scales_of(*dims: str) -> declare.Output:
    """Return the output of E8M0 scales."""
    return declare.Output("scales", dims, "torch.float8_e8m0fnu")
