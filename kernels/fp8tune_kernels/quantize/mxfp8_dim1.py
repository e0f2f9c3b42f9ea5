"""``mxfp8-dim1``: quantize an ``(M, K)`` matrix to MXFP8 in blocks of 32 along M, transposed in memory.

    amax[k, b]   = max over the 32 rows m of block b of |x[m, k]|
    scales[k, b] = E8M0 scale of amax[k, b]                    see :mod:`.mxfp8_arithmetic`
    q[m, k]      = fp8(clamp(x[m, k] / scales[k, m // 32]))

    x       (M, K), row-major, bfloat16, float16 or float32
    q       (M, K), strides (1, M rounded up to 16): the operand of a block-scaled GEMM that contracts over M
    scales  (K, ceil(M / 32)), row-major, float8_e8m0fnu

Of groups of rows the sizes must be multiples of 32, as no block may straddle two; their scales are slices of columns.
Where M is no multiple of 32, the last block of a column is the shorter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import edge
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits
from . import mxfp8_dim0, rowwise_2d
from .arithmetic import magnitude, magnitude_to_float32
from .limits import too_many_shared_bytes
from .mxfp8_arithmetic import SCALE_MODES, e8m0_of, launch_values, quantize_block, reference_blocks, scales_of


@triton.jit(do_not_specialize=["M"])  # it changes every step and must not recompile anything
def mxfp8_dim1_kernel(
    x_ptr: tl.tensor,  # (E, M, K), row-major
    q_ptr: tl.tensor,  # (E, K, q_stride), row-major
    scales_ptr: tl.tensor,  # (E, K, ceil(M / 32)), row-major, E8M0 codes
    M: tl.tensor,
    K: tl.tensor,
    q_stride: tl.tensor,
    FP8_MAX: tl.constexpr,
    FP8_MAX_BITS: tl.constexpr,
    RCEIL: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """One program: a tile of BLOCK_SIZE_M rows (32 or more) and BLOCK_SIZE_K columns of one matrix, read once.

    The rows of a tile are taken block after block (row 0 of each, then row 1), so that a thread holds many rows of
    the same block and reduces them alone; on their way to the transposed store they are put in order again.
    WHOLE_CHUNKS: q_stride is a multiple of 16, and all between row M and it is padding that may be written.
    """
    BLOCKS: tl.constexpr = BLOCK_SIZE_M // 32
    tiles_k = tl.cdiv(K, BLOCK_SIZE_K)
    tiles = tl.cdiv(M, BLOCK_SIZE_M) * tiles_k
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    columns = tile % tiles_k * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    in_columns = (columns < K)[None, :]

    at = tl.arange(0, BLOCK_SIZE_M)
    rows = tile // tiles_k * BLOCK_SIZE_M + at % BLOCKS * 32 + at // BLOCKS
    x_rows = x_ptr + (matrix * M + rows)[:, None] * K
    x = tl.load(x_rows + columns[None, :], mask=(rows < M)[:, None] & in_columns, other=0.0)
    x = x.reshape(32, BLOCKS, BLOCK_SIZE_K)
    code = e8m0_of(magnitude_to_float32(tl.max(magnitude(x), 0), x_ptr.dtype.element_ty), FP8_MAX_BITS, RCEIL)
    q = quantize_block(x, code[None, :, :], q_ptr.dtype.element_ty, FP8_MAX)
    q = q.permute(1, 0, 2).reshape(BLOCK_SIZE_M, BLOCK_SIZE_K)

    rows = tile // tiles_k * BLOCK_SIZE_M + at
    # A mask that is constant over each chunk of 16 rows keeps the stores 16 bytes wide.
    in_rows = rows // 16 * 16 < M if WHOLE_CHUNKS else rows < M
    lines = matrix * K + columns
    tl.store(q_ptr + lines[None, :] * q_stride + rows[:, None], q, mask=in_rows[:, None] & in_columns)
    blocks = tile // tiles_k * BLOCKS + tl.arange(0, BLOCKS)
    in_blocks = (blocks < tl.cdiv(M, 32))[:, None]
    scale_at = lines[None, :] * tl.cdiv(M, 32) + blocks[:, None]
    tl.store(scales_ptr + scale_at, code.to(tl.uint8), mask=in_blocks & in_columns)


def launch(config: Config, call: Call, matrices: int = 1) -> None:
    """Launch a program per tile, neighbours along K first; ``x`` may be several matrices ``(E, M, K)``."""
    programs = matrices * -(-call.M // config["BLOCK_SIZE_M"]) * -(-call.K // config["BLOCK_SIZE_K"])
    stride = call.q.stride(-1)
    call.run(mxfp8_dim1_kernel, programs, config, q_stride=stride, WHOLE_CHUNKS=stride % 16 == 0, **launch_values(call))


def reference(call: Call) -> None:
    """Quantize blocks of rows in plain torch."""
    q, scales = reference_blocks(call.x.t(), call.float8_dtype, call.scale_mode)
    call.q.copy_(q.t())
    call.scales.copy_(scales)


def allocate(M: int, K: int, float8_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized FP8 values. All columns have their padding in memory, also the last one."""
    stride = (M + 15) // 16 * 16
    return torch.empty(K * stride, dtype=float8_dtype, device=device).as_strided((M, K), (1, stride))


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    count = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_K"]
    return too_many_shared_bytes(count, "of codes to transpose", limits) or mxfp8_dim0.invalid(config, shape, limits)


AXES = {
    "BLOCK_SIZE_M": (32, 64, 128, 256, 512),
    "BLOCK_SIZE_K": (32, 64, 128, 256, 512),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1,),  # a tile is read once: there is no loop to pipeline
}

SPEC = declare.kernel(
    name="mxfp8-dim1",
    arguments=mxfp8_dim0.ARGUMENTS,
    defaults={"scale_mode": "floor"},
    outputs=(declare.fp8("q", allocate=allocate), scales_of("K", "-(-M // 32)")),
    launch=launch,
    reference=reference,
    axes=AXES,
    default={"BLOCK_SIZE_M": 256, "BLOCK_SIZE_K": 128, "num_warps": 8, "num_stages": 1},
    key=("M_bucket", "K"),
    problems=rowwise_2d.PROBLEMS,
    interpreted={"M": 157, "K": 101},  # no tile divides either; the last block of a column has 29 rows
    invalid=invalid,
    edges=(
        edge("one row, huge values", "huge", M=1, K=48),
        edge("a block of rows and one more, NaN", "nan", M=513, K=48),
        edge("a prime, infinity", "infinite", M=61, K=80),
        edge("zeros", "zeros", M=33, K=16),
        edge("one column, tiny values", "tiny", M=67, K=1),
        edge("a block of columns and one more past an aligned address", offset=1, M=37, K=513),
    ),
    scale_modes=SCALE_MODES,
)

quantize_mxfp8_dim1 = SPEC.define()
