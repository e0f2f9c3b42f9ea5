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

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ..edges import declared, edge
from ..inputs import dtype_named, random_matrix
from ..runtime.checks import check_matrix, fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import DeviceLimits, KernelSpec, NamedInts, Problem
from . import rowwise_2d
from .arithmetic import FP8_MAX, magnitude, magnitude_to_float32
from .limits import idle_columns, wrong_tile
from .mxfp8_arithmetic import (
    FP8_MAX_BITS,
    MX_BLOCK,
    SCALE_MODES,
    check_scale_mode,
    e8m0_of,
    quantize_block,
    reference_blocks,
)

__all__ = ["SPEC", "quantize_mxfp8_dim0"]


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


def quantize_mxfp8_dim0(
    x: torch.Tensor, *, float8_dtype: torch.dtype | None = None, scale_mode: str = "floor"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` in blocks of 32 columns; returns ``(q, scales)`` as the module and the package say."""
    return _operator(x, float8_dtype, scale_mode)


def reference(x: torch.Tensor, float8_dtype: torch.dtype, scale_mode: str) -> Tensors:
    """The same in plain torch."""
    q, _ = outputs(x, float8_dtype, scale_mode)
    codes, scales = reference_blocks(x, float8_dtype, scale_mode)
    return q.copy_(codes), scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, float8_dtype, scale_mode)`` of a problem."""
    x = random_matrix(problem, problem.shape["M"], problem.shape["K"], device)
    return x, dtype_named(problem.fp8_dtype), problem.scale_mode


def outputs(x: torch.Tensor, float8_dtype: torch.dtype, scale_mode: str) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    M, K = x.shape
    q = torch.empty(M, K, dtype=float8_dtype, device=x.device)
    return q, torch.empty(M, -(-K // MX_BLOCK), dtype=torch.float8_e8m0fnu, device=x.device)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch: a program for every tile, neighbours along K first."""
    x, float8_dtype, scale_mode = inputs
    q, scales = outputs
    M, K = x.shape
    programs = -(-M // config["BLOCK_SIZE_M"]) * -(-K // config["BLOCK_SIZE_K"])
    if programs:
        constants = (FP8_MAX[float8_dtype], FP8_MAX_BITS[float8_dtype], scale_mode == "rceil")
        tensors = (x, q, scales.view(torch.uint8))  # Triton has no E8M0 pointers
        launch_kernel(mxfp8_dim0_kernel, programs, tensors, (M, K), constants, config)


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None."""
    tile = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_K"]
    return wrong_tile(config, tile, limits) or idle_columns(config["BLOCK_SIZE_K"], shape["K"], "tile")


SPEC = KernelSpec(
    name="mxfp8-dim0",
    axes={
        "BLOCK_SIZE_M": (1, 2, 4, 8, 16, 32),
        "BLOCK_SIZE_K": (64, 128, 256, 512, 1024, 2048),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1,),  # a tile is read once: there is no loop to pipeline
    },
    default=NamedInts(BLOCK_SIZE_M=4, BLOCK_SIZE_K=1024, num_warps=4, num_stages=1),
    key=("M_bucket", "K"),
    problems=rowwise_2d.problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"M": 13, "K": 203},  # no tile divides either; the last block of a row has 11 columns
    invalid=invalid,
    edges=declared(
        edge("one row, huge values", "huge", M=1, K=48),
        edge("a block of rows and one more, NaN", "nan", M=33, K=80),
        edge("a prime, infinity", "infinite", M=7, K=112),
        edge("zeros", "zeros", M=3, K=48),
        edge("one column, tiny values", "tiny", M=37, K=1),
        edge("a block of columns and one more past an aligned address", offset=1, M=3, K=2049),
    ),
    scale_modes=SCALE_MODES,
    uses_fp8=True,
)


def arguments(x: torch.Tensor, float8_dtype: torch.dtype | None, scale_mode: str) -> Inputs:
    check_matrix("x", x)
    check_scale_mode(scale_mode)
    return x, fp8_dtype_for(x.device, float8_dtype), scale_mode


_operator = register(SPEC, quantize_mxfp8_dim0, arguments, rowwise_2d.key)
