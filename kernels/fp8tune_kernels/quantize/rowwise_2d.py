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

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl

from ..catalog import SPANS
from ..edges import declared, edge, long_tail, past_half
from ..inputs import dtype_named, random_matrix
from ..runtime.checks import check_matrix, fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import SCALE_MODES, DeviceLimits, KernelSpec, NamedInts, Problem, bucket
from .arithmetic import (
    FP8_MAX,
    magnitude,
    magnitude_to_float32,
    quantize,
    reference_cast,
    reference_scale,
    scale_of,
)
from .limits import too_many_shared_bytes, wrong_tile

__all__ = ["SPEC", "quantize_rowwise_2d"]


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


def quantize_rowwise_2d(
    x: torch.Tensor, *, float8_dtype: torch.dtype | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` row by row; returns ``(q, scales)`` as the module and the package say."""
    return _operator(x, float8_dtype, power_of_two)


def reference(x: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """The same in plain torch."""
    amax = x.abs().amax(1, keepdim=True).float() if x.shape[1] else x.new_zeros(len(x), 1, dtype=torch.float32)
    scales = reference_scale(amax, float8_dtype, power_of_two)
    return reference_cast(x, scales, float8_dtype), scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, float8_dtype, power_of_two)`` of a problem."""
    x = random_matrix(problem, problem.shape["M"], problem.shape["K"], device)
    return x, dtype_named(problem.fp8_dtype), problem.scale_mode == "power-of-two"


def outputs(x: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    q = torch.empty_like(x, dtype=float8_dtype, memory_format=torch.contiguous_format)
    return q, x.new_empty(x.shape[0], 1, dtype=torch.float32)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch: a program for every BLOCK_SIZE rows, a tile no wider than the row needs."""
    x, float8_dtype, power_of_two = inputs
    launch_rows(config, (x, *outputs), *x.shape, float8_dtype, power_of_two)  # type: ignore[call-arg]  # two sizes


def launch_rows(
    config: Mapping[str, int],
    tensors: tuple[torch.Tensor, ...],
    M: int,
    K: int,
    float8_dtype: torch.dtype,
    power_of_two: bool,
) -> None:
    """The same on x, q and scales of any shape that lie in memory as M rows of K."""
    programs = -(-M // config["BLOCK_SIZE"])
    width = _tile_width(config, K)
    if programs:
        constants = (FP8_MAX[float8_dtype], power_of_two, width >= K)
        tile = {**config, "BLOCK_SIZE_ITER": width}
        launch_kernel(rowwise_2d_kernel, programs, tensors, (M, K), constants, tile)


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The activations A, ``(M, K)``, and the output's gradient, ``(M, N)``: left operands of the GEMMs."""
    yield NamedInts(M=row["M"], K=row["K"])
    yield NamedInts(M=row["M"], K=row["N"])


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. No tile is launched wider than the row needs."""
    width, stages = _tile_width(config, shape["K"]), config["num_stages"]
    tile = config["BLOCK_SIZE"] * width
    if width >= shape["K"] and stages != (least := min(SPEC.axes["num_stages"])):
        return f"same binary as num_stages={least}: the row is read once, without a loop"
    staged = 2 * tile * stages if width < shape["K"] and stages > 1 else 0
    return wrong_tile(
        config,
        tile,
        limits,
        least=8,
        too_few="too few for one 16-byte load of bfloat16",
        held="the tile and its maxima do",
    ) or too_many_shared_bytes(staged, "of tiles in flight", limits)


def _tile_width(config: Mapping[str, int], K: int) -> int:
    """Columns of the tile that is launched: BLOCK_SIZE_ITER, but no more than the next power of two of the row's."""
    return min(config["BLOCK_SIZE_ITER"], 1 << max(K - 1, 0).bit_length())


SPEC = KernelSpec(
    name="rowwise-2d",
    axes={
        "BLOCK_SIZE": (1, 2, 4, 8),
        "BLOCK_SIZE_ITER": (1024, 2048, 4096, 8192),
        "num_warps": (2, 4, 8, 16),
        "num_stages": (1, 2, 4),
    },
    default=NamedInts(BLOCK_SIZE=2, BLOCK_SIZE_ITER=8192, num_warps=8, num_stages=1),
    key=("M_bucket", "K"),
    span=SPANS["rowwise-2d"],
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"M": 29, "K": 5003},  # no block divides either; rows stay longer than the shorter tiles
    invalid=invalid,
    edges=declared(
        edge("one row, huge values", "huge", M=1),
        edge("a block of rows and one more, long tails", M=17, K=long_tail("K")),
        edge("a prime, infinity", "infinite", M=7, K=past_half("K", 16)),
        edge("three rows, NaN", "nan", M=3, K=past_half("K", 16)),
        edge("zeros", "zeros", M=2),
        edge("one column, tiny values", "tiny", M=11, K=1),
        edge("a block of columns and one more past an aligned address", offset=1, M=5, K=past_half("K")),
    ),
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def _arguments(x: torch.Tensor, float8_dtype: torch.dtype | None, power_of_two: bool) -> Inputs:
    check_matrix("x", x)
    return x, fp8_dtype_for(x.device, float8_dtype), power_of_two


def key(x: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1]


_operator = register(SPEC, quantize_rowwise_2d, _arguments, key)
