"""``transpose-3d-reduction``: quantize and transpose expert weights in one launch, without atomics.

The contract is in :mod:`fp8tune_kernels.transpose_3d`: one scale per expert and row of K, reduced over N, which is
strided in memory; the codes are written with N contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from fp8tune_kernels import weights
from fp8tune_kernels.arithmetic import FP8_MAX, magnitude_to_float32, scale_of
from fp8tune_kernels.ops import register
from fp8tune_kernels.spec import DeviceLimits, KernelSpec, NamedInts, Problem
from fp8tune_kernels.tiles import fold, folded_rows, of_any_layout
from fp8tune_kernels.transpose_3d import cast_tile, load_tile, outputs, reference

__all__ = ["SPEC", "quantize_transpose_3d_reduction"]


@triton.jit
def transpose_3d_reduction_kernel(
    w_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    q_ptr: tl.tensor,  # (E, N, K), strides (N*K, 1, N)
    scales_ptr: tl.tensor,  # (E, 1, K)
    N: tl.tensor,
    K: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    num_warps: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program: BLOCK_SIZE_K columns of K of one expert, all its N rows.

    It walks the rows BLOCK_SIZE_N at a time for the maxima, and then backwards for the cast, so that the rows read
    last are found in the cache. The first tile, which would be the surest to miss, stays in registers: where it holds
    all rows, they are read once.
    """
    blocks = tl.cdiv(K, BLOCK_SIZE_K)
    expert = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    in_columns = (columns < K)[None, :]
    w_columns = w_ptr + expert * N * K + columns[None, :]
    q_columns = q_ptr + (expert * K + columns)[None, :] * N
    rows = tl.arange(0, BLOCK_SIZE_N)
    tiles = tl.cdiv(N, BLOCK_SIZE_N)

    first = load_tile(w_columns, rows, N, K, in_columns)
    folded: tl.constexpr = folded_rows(BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps)
    largest = fold(tl.zeros((folded, BLOCK_SIZE_K), tl.int32), first)
    for tile in tl.range(1, tiles, num_stages=num_stages):
        largest = fold(largest, load_tile(w_columns, tile * BLOCK_SIZE_N + rows, N, K, in_columns))
    scale = scale_of(magnitude_to_float32(tl.max(largest, 0), w_ptr.dtype.element_ty), FP8_MAX, POWER_OF_TWO)
    tl.store(scales_ptr + expert * K + columns, scale, mask=columns < K)
    scale = of_any_layout(scale)

    for back in tl.range(1, tiles, num_stages=num_stages):
        lower = (tiles - back) * BLOCK_SIZE_N + rows
        w = load_tile(w_columns, lower, N, K, in_columns)
        cast_tile(q_columns, lower, w, scale, N, in_columns, FP8_MAX)
    cast_tile(q_columns, rows, first, scale, N, in_columns, FP8_MAX)


def quantize_transpose_3d_reduction(
    w: torch.Tensor, *, float8_dtype: torch.dtype | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize and transpose each expert's ``w``; returns ``(q, scales)`` of :mod:`fp8tune_kernels.transpose_3d`.

    ``float8_dtype`` None is the format of the running arch (e4m3fnuz on gfx942, else e4m3fn). A NaN in a row of K of
    an expert makes its scale and codes NaN. Launches once, with the config that the exported table has for these
    sizes, and waits for nothing. On a CPU without Triton's interpreter it runs the plain torch reference.

    Raises ValueError, before any launch, for a wrong dtype, rank or stride of ``w``.
    """
    return _operator(w, float8_dtype, power_of_two)


def launch(config: Mapping[str, int], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    """One launch: a program for every block of columns of every expert, a tile no longer than the expert needs."""
    w, float8_dtype, power_of_two = inputs
    E, K, N = w.shape
    programs = -(-K // config["BLOCK_SIZE_K"]) * E
    if programs:
        tile = {**config, "BLOCK_SIZE_N": _tile_rows(config, N)}
        transpose_3d_reduction_kernel[(programs,)](w, *outputs, N, K, FP8_MAX[float8_dtype], power_of_two, **tile)


def scaled_down(problem: Problem) -> Problem:
    """At most 2 experts of 1,109 rows of 37: no block divides either, and rows are more than the shorter tiles."""
    return weights.scaled_down(problem, E=2, N=1109, K=37)


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. No tile is launched longer than the expert needs."""
    rows = _tile_rows(config, shape["N"])
    threads = config["num_warps"] * limits.warp_size
    values = rows * config["BLOCK_SIZE_K"] // threads
    staged = 2 * rows * config["BLOCK_SIZE_K"] * (config["num_stages"] - 1)
    if threads > limits.max_threads_per_block:
        return f"{threads} threads a block, {limits.arch} has at most {limits.max_threads_per_block}"
    if rows >= shape["N"] and config["num_stages"] > 1:
        return "same as num_stages=1: all rows are read once, without a loop"
    if values < 16:
        return f"{values} values a thread: too few for one 16-byte store of FP8"
    if values > 128:
        return f"{values} values a thread: two tiles do not fit in registers"
    if staged > limits.shared_bytes_per_block:
        room = limits.shared_bytes_per_block
        return f"{staged} bytes of tiles in flight, {limits.arch} has {room} of shared memory a block"
    if config["BLOCK_SIZE_K"] >= 2 * shape["K"]:
        return f"{config['BLOCK_SIZE_K']} columns a block for {shape['K']}: half of the threads idle"
    return None


def _tile_rows(config: Mapping[str, int], N: int) -> int:
    """Rows of the tile that is launched: BLOCK_SIZE_N, but no more than the next power of two of the expert's."""
    return min(config["BLOCK_SIZE_N"], 1 << max(N - 1, 0).bit_length())


SPEC = KernelSpec(
    name="transpose-3d-reduction",
    axes={
        "BLOCK_SIZE_N": (128, 256, 512, 1024, 2048),
        "BLOCK_SIZE_K": (16, 32, 64, 128),
        "num_warps": (4, 8, 16),
        "num_stages": (1, 2, 4),
    },
    default=NamedInts(BLOCK_SIZE_N=256, BLOCK_SIZE_K=64, num_warps=8, num_stages=1),
    key=weights.KEY,
    problems=weights.problems,
    inputs=weights.inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    bytes_moved=weights.bytes_moved,
    scaled_down=scaled_down,
    invalid=invalid,
)

_operator: Callable[..., tuple[torch.Tensor, torch.Tensor]] = register(
    SPEC,
    "quantize_transpose_3d_reduction(Tensor w, ScalarType? float8_dtype, bool power_of_two) -> (Tensor, Tensor)",
    weights.arguments,
    weights.key,
)
