"""How kernels that reduce over rows and write columns handle a tile: they read it along one axis and write the other.

Shared by the kernels that quantize column by column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8tune_kernels.arithmetic import magnitude

__all__ = ["fold", "folded_rows", "of_any_layout"]


@triton.constexpr_function
def folded_rows(rows: int, columns: int, num_warps: int) -> int:
    """Rows of the running maxima of a tile of ``(rows, columns)``: as many as all threads hold at once in vectors of 8
    (a warp has at most 64 of them), so that folding a tile into them moves nothing between threads."""
    return rows // max(1, rows * columns // (num_warps * 64 * 8))


@triton.jit
def fold(largest: tl.tensor, tile: tl.tensor) -> tl.tensor:
    """The running maxima of ``magnitude``, int32 ``(folded_rows(...), columns)``, with a tile taken in."""
    by_fold = magnitude(tile).reshape(tile.shape[0] // largest.shape[0], largest.shape[0], largest.shape[1])
    return tl.maximum(largest, tl.max(by_fold, 0))


@triton.jit
def of_any_layout(scale: tl.tensor) -> tl.tensor:
    """The same scales, of which the compiler can have a second copy in the layout of the store.

    A scale that comes of a reduction is tied to the layout of the load: the compiler then casts there, and transposes
    the codes through shared memory byte by byte. An identity gather unties it, and the input is transposed instead:
    16 bytes an access and, on NVIDIA, by ``ldmatrix``.
    """
    return tl.gather(scale, tl.arange(0, scale.shape[0]), 0)
