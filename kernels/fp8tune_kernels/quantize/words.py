"""Codes of four rows as one word: they change threads together, which takes a quarter of the accesses of bytes."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .arithmetic import canonical_nan


@triton.jit
def words_of_bytes(first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor) -> tl.tensor:
    """Put four tiles of bytes together, the first tile's lowest.

    On NVIDIA eight permutations make four words of each thread's 16 bytes. The compiler's own code takes three times as
    many, and words of shifted codes came out wrong: see :mod:`.transposed_codes`.
    """
    if is_cuda():
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, lower, higher;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $6, $7, 0x5140;
            prmt.b32 lower, $4, $5, 0x7362;
            prmt.b32 higher, $6, $7, 0x7362;
            prmt.b32 $0, low, high, 0x5410;
            prmt.b32 $1, low, high, 0x7632;
            prmt.b32 $2, lower, higher, 0x5410;
            prmt.b32 $3, lower, higher, 0x7632; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [first, second, third, fourth],
            dtype=tl.uint32,
            is_pure=True,
            pack=4,
        )
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        low = first.to(tl.uint32) | (second.to(tl.uint32) << 8)
        return low | (third.to(tl.uint32) << 16) | (fourth.to(tl.uint32) << 24)


@triton.jit
def shifted_bytes(codes: tl.tensor, shift: tl.tensor, dtype: tl.constexpr, FP8_MAX: tl.constexpr) -> tl.tensor:
    """Multiply bytes of FP8 codes by powers of two that are at most 1, rounded to nearest even.

    In float16, which converts two codes at a time: products are exact there, but for those that FP8 has as zeros.
    """
    product = codes.to(dtype, bitcast=True).to(tl.float16) * shift.to(tl.float16)
    return canonical_nan(product, product.to(dtype), FP8_MAX).to(tl.uint8, bitcast=True)
