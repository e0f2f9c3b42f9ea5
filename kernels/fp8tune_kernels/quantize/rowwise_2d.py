"""``rowwise-2d``: quantize an ``(M, K)`` matrix to FP8 with one scale per row, row-major in and out.

    amax[m]   = max over k of |x[m, k]|
    scales[m] = scale of amax[m]                               see :mod:`.arithmetic`
    q[m, k]   = fp8(clamp(x[m, k] * scales[m]))

    x       (M, K), row-major, bfloat16, float16 or float32
    q       (M, K), row-major: the left operand of a scaled grouped GEMM
    scales  (M, 1), float32; a GEMM is given the reciprocals

Groups do not enter: a row belongs to one of them whole. Rows past the last group are quantized like any other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import edge, long_tail, past_half
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits
from .arithmetic import magnitude, magnitude_to_float32, quantize, reference_cast, reference_scale, scale_of
from .limits import too_many_shared_bytes, wrong_tile


@triton.jit(do_not_specialize=["M"])  # it changes every step and must not recompile anything
def rowwise_2d_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    q_ptr: tl.tensor,  # (M, K), row-major
    scales_ptr: tl.tensor,  # (M, 1)
    M: tl.tensor,
    K: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ONE_PASS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program: BLOCK_SIZE rows.

    Where one tile of BLOCK_SIZE_ITER columns spans the row it is read once and kept in registers; else the program
    walks the row twice, for the maximum and then backwards for the cast, so that the columns read last are found in
    the cache.
    """
    rows = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    in_rows = (rows < M)[:, None]
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    q_rows = q_ptr + rows.to(tl.int64)[:, None] * K

    columns = tl.arange(0, BLOCK_SIZE_ITER)[None, :]
    if ONE_PASS:
        x = tl.load(x_rows + columns, mask=in_rows & (columns < K), other=0.0)
        largest = magnitude(x)
    else:
        largest = magnitude(tl.zeros((BLOCK_SIZE, BLOCK_SIZE_ITER), x_ptr.dtype.element_ty))
        for column in tl.range(0, K, BLOCK_SIZE_ITER, num_stages=num_stages):
            inside = in_rows & (column + columns < K)
            largest = tl.maximum(largest, magnitude(tl.load(x_rows + column + columns, mask=inside, other=0.0)))
    scale = scale_of(magnitude_to_float32(tl.max(largest, 1), x_ptr.dtype.element_ty), FP8_MAX, POWER_OF_TWO)
    tl.store(scales_ptr + rows, scale, mask=rows < M)

    if ONE_PASS:
        q = quantize(x, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
        tl.store(q_rows + columns, q, mask=in_rows & (columns < K))
    else:
        tiles = tl.cdiv(K, BLOCK_SIZE_ITER)
        for tile in tl.range(0, tiles, num_stages=num_stages):
            column = (tiles - 1 - tile) * BLOCK_SIZE_ITER
            inside = in_rows & (column + columns < K)
            x = tl.load(x_rows + column + columns, mask=inside, other=0.0)
            q = quantize(x, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
            tl.store(q_rows + column + columns, q, mask=inside)


def launch(config: Config, call: Call) -> None:
    """Launch one program per BLOCK_SIZE rows, with a tile no wider than a row needs."""
    width, programs = tile_width(config, call.K), -(-call.M // config["BLOCK_SIZE"])
    call.run(rowwise_2d_kernel, programs, {**config, "BLOCK_SIZE_ITER": width}, ONE_PASS=width >= call.K)


def tile_width(config: Config, K: int) -> int:
    """Return the columns of a tile: BLOCK_SIZE_ITER, but at most the next power of two of K."""
    return min(config["BLOCK_SIZE_ITER"], 1 << max(K - 1, 0).bit_length())


def reference(call: Call) -> None:
    """Quantize each row in plain torch."""
    amax = call.x.abs().amax(1, keepdim=True).float() if call.K else torch.zeros_like(call.scales)
    call.scales.copy_(reference_scale(amax, call.float8_dtype, call.power_of_two))
    call.q.copy_(reference_cast(call.x, call.scales, call.float8_dtype))


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    width, stages = tile_width(config, shape["K"]), config["num_stages"]
    tile = config["BLOCK_SIZE"] * width
    if width >= shape["K"] and stages != (least := min(SPEC.axes["num_stages"])):
        return f"same binary as num_stages={least}: the row is read once, without a loop"
    staged = 2 * tile * stages if width < shape["K"] and stages > 1 else 0
    few, held = "too few for one 16-byte load of bfloat16", "the tile and its maxima do"
    return wrong_tile(config, tile, limits, least=8, too_few=few, held=held) or too_many_shared_bytes(
        staged, "of tiles in flight", limits
    )


PROBLEMS = ({"M": "M", "K": "K"}, {"M": "M", "K": "N"})
"""Left operands of the GEMMs: the activations and the gradient of the output."""

SPEC = declare.kernel(
    name="rowwise-2d",
    arguments=(declare.matrix("x", "M", "K"), declare.FLOAT8_DTYPE, declare.POWER_OF_TWO),
    outputs=(declare.fp8("q", "M", "K"), declare.float32("scales", "M", "1")),
    launch=launch,
    reference=reference,
    axes={
        "BLOCK_SIZE": (1, 2, 4, 8),
        "BLOCK_SIZE_ITER": (1024, 2048, 4096, 8192),
        "num_warps": (2, 4, 8, 16),
        "num_stages": (1, 2, 4),
    },
    default={"BLOCK_SIZE": 2, "BLOCK_SIZE_ITER": 8192, "num_warps": 8, "num_stages": 1},
    key=("M_bucket", "K"),
    problems=PROBLEMS,
    interpreted={"M": 29, "K": 5003},  # no block divides either; rows stay longer than the shorter tiles
    invalid=invalid,
    edges=(
        edge("one row, huge values", "huge", M=1),
        edge("a block of rows and one more, long tails", M=17, K=long_tail("K")),
        edge("a prime, infinity", "infinite", M=7, K=past_half("K", 16)),
        edge("three rows, NaN", "nan", M=3, K=past_half("K", 16)),
        edge("zeros", "zeros", M=2),
        edge("one column, tiny values", "tiny", M=11, K=1),
        edge("a block of columns and one more past an aligned address", offset=1, M=5, K=past_half("K")),
    ),
)

quantize_rowwise_2d = SPEC.define()
