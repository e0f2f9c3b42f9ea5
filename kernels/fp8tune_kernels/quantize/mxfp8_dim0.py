"""``mxfp8-dim0``: quantize an ``(M, K)`` matrix to MXFP8 in blocks of 32 along K, row-major in and out.

    amax[m, b]   = max over the 32 columns k of block b of |x[m, k]|
    scales[m, b] = E8M0 scale of amax[m, b]                    see :mod:`.mxfp8_arithmetic`
    q[m, k]      = fp8(clamp(x[m, k] / scales[m, k // 32]))

    x       (M, K), row-major, bfloat16, float16 or float32
    q       (M, K), row-major: the left operand of a block-scaled GEMM that contracts over K
    scales  (M, ceil(K / 32)), row-major, float8_e8m0fnu

A GEMM wants K to be a multiple of 32; where it is not, the last block of a row is the shorter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..edges import edge
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits
from . import rowwise_2d
from .arithmetic import magnitude, magnitude_to_float32
from .limits import idle_columns, wrong_tile
from .mxfp8_arithmetic import (
    SCALE_MODE,
    SCALE_MODES,
    e8m0_of,
    launch_values,
    quantize_block,
    reference_blocks,
    scales_of,
)


@triton.jit(do_not_specialize=["M"])  # it changes every step and must not recompile anything
def mxfp8_dim0_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    q_ptr: tl.tensor,  # (M, K), row-major
    scales_ptr: tl.tensor,  # (M, ceil(K / 32)), row-major, E8M0 codes
    M: tl.tensor,
    K: tl.tensor,
    FP8_MAX: tl.constexpr,
    FP8_MAX_BITS: tl.constexpr,
    RCEIL: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """One program: a tile of BLOCK_SIZE_M rows and BLOCK_SIZE_K columns, read once. BLOCK_SIZE_K: 32 or more."""
    tiles = tl.cdiv(K, BLOCK_SIZE_K)
    tile = tl.program_id(0) % tiles
    rows = tl.program_id(0) // tiles * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    in_rows = (rows < M)[:, None]
    columns = tile * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    inside = in_rows & (columns < K)[None, :]
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]

    x = tl.load(x_ptr + at, mask=inside, other=0.0).reshape(BLOCK_SIZE_M, BLOCK_SIZE_K // 32, 32)
    code = e8m0_of(magnitude_to_float32(tl.max(magnitude(x), 2), x_ptr.dtype.element_ty), FP8_MAX_BITS, RCEIL)
    q = quantize_block(x, code[:, :, None], q_ptr.dtype.element_ty, FP8_MAX)
    tl.store(q_ptr + at, q.reshape(BLOCK_SIZE_M, BLOCK_SIZE_K), mask=inside)

    blocks = tile * (BLOCK_SIZE_K // 32) + tl.arange(0, BLOCK_SIZE_K // 32)
    scale_at = rows.to(tl.int64)[:, None] * tl.cdiv(K, 32) + blocks[None, :]
    tl.store(scales_ptr + scale_at, code.to(tl.uint8), mask=in_rows & (blocks < tl.cdiv(K, 32))[None, :])


def launch(config: Config, call: Call) -> None:
    """Launch a program per tile, neighbours along K first."""
    programs = -(-call.M // config["BLOCK_SIZE_M"]) * -(-call.K // config["BLOCK_SIZE_K"])
    call.run(mxfp8_dim0_kernel, programs, config, **launch_values(call))


def reference(call: Call) -> None:
    """Quantize blocks of columns in plain torch."""
    q, scales = reference_blocks(call.x, call.float8_dtype, call.scale_mode)
    call.q.copy_(q)
    call.scales.copy_(scales)


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    tile = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_K"]
    return wrong_tile(config, tile, limits) or idle_columns(config["BLOCK_SIZE_K"], shape["K"], "tile")


ARGUMENTS = (declare.matrix("x", "M", "K"), declare.FLOAT8_DTYPE, SCALE_MODE)

SPEC = declare.kernel(
    name="mxfp8-dim0",
    arguments=ARGUMENTS,
    defaults={"scale_mode": "floor"},
    outputs=(declare.fp8("q", "M", "K"), scales_of("M", "-(-K // 32)")),
    launch=launch,
    reference=reference,
    axes={
        "BLOCK_SIZE_M": (1, 2, 4, 8, 16, 32),
        "BLOCK_SIZE_K": (64, 128, 256, 512, 1024, 2048),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1,),  # a tile is read once: there is no loop to pipeline
    },
    default={"BLOCK_SIZE_M": 4, "BLOCK_SIZE_K": 1024, "num_warps": 4, "num_stages": 1},
    key=("M_bucket", "K"),
    problems=rowwise_2d.PROBLEMS,
    interpreted={"M": 13, "K": 203},  # no tile divides either; the last block of a row has 11 columns
    invalid=invalid,
    edges=(
        edge("one row, huge values", "huge", M=1, K=48),
        edge("a block of rows and one more, NaN", "nan", M=33, K=80),
        edge("a prime, infinity", "infinite", M=7, K=112),
        edge("zeros", "zeros", M=3, K=48),
        edge("one column, tiny values", "tiny", M=37, K=1),
        edge("a block of columns and one more past an aligned address", offset=1, M=3, K=2049),
    ),
    scale_modes=SCALE_MODES,
)

quantize_mxfp8_dim0 = SPEC.define()
