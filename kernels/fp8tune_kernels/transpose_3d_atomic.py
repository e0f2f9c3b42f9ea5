"""``transpose-3d-atomic``: quantize and transpose expert weights in two launches; the maxima meet in memory.

The contract is in :mod:`fp8tune_kernels.transpose_3d`: one scale per expert and row of K, reduced over N, which is
strided in memory; the codes are written with N contiguous. The first launch takes maxima of pieces of the rows, by
atomic maximum over zeros, the second casts and transposes. So even one small expert fills a GPU.
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

__all__ = ["SPEC", "quantize_transpose_3d_atomic"]

ROWS_PER_PROGRAM = 256
"""Enough for a pipeline of tiles and few atomics, and little enough for thousands of programs an expert."""


@triton.jit
def transpose_3d_amax_kernel(
    w_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    amax_ptr: tl.tensor,  # (E, K), int32: bits of |w|, zero before the launch
    N: tl.tensor,
    K: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    num_warps: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program: the maxima of ROWS rows of BLOCK_SIZE_K columns of K of one expert, BLOCK_SIZE_N rows at a time."""
    expert, start, columns = _piece(tl.program_id(0), N, K, ROWS, BLOCK_SIZE_K)
    w_columns = w_ptr + expert * N * K + columns[None, :]
    folded: tl.constexpr = folded_rows(BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps)
    largest = tl.zeros((folded, BLOCK_SIZE_K), tl.int32)
    for row in tl.range(start, tl.minimum(start + ROWS, N), BLOCK_SIZE_N, num_stages=num_stages):
        rows = row + tl.arange(0, BLOCK_SIZE_N)
        largest = fold(largest, load_tile(w_columns, rows, N, K, (columns < K)[None, :]))
    tl.atomic_max(amax_ptr + expert * K + columns, tl.max(largest, 0), mask=columns < K, sem="relaxed")


@triton.jit
def transpose_3d_cast_kernel(
    w_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    amax_ptr: tl.tensor,  # (E, K), int32: bits of |w|
    q_ptr: tl.tensor,  # (E, N, K), strides (N*K, 1, N)
    scales_ptr: tl.tensor,  # (E, 1, K)
    N: tl.tensor,
    K: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program: the codes of what one program of the first launch read.

    The last piece goes first: what that launch read last is found in the cache.
    """
    expert, start, columns = _piece(tl.num_programs(0) - 1 - tl.program_id(0), N, K, ROWS, BLOCK_SIZE_K)
    in_columns = (columns < K)[None, :]
    w_columns = w_ptr + expert * N * K + columns[None, :]
    q_columns = q_ptr + (expert * K + columns)[None, :] * N
    amax = magnitude_to_float32(tl.load(amax_ptr + expert * K + columns, mask=columns < K), w_ptr.dtype.element_ty)
    scale = of_any_layout(scale_of(amax, FP8_MAX, POWER_OF_TWO))
    tl.store(scales_ptr + expert * K + columns, scale, mask=columns < tl.where(start == 0, K, 0))
    for row in tl.range(start, tl.minimum(start + ROWS, N), BLOCK_SIZE_N, num_stages=num_stages):
        rows = row + tl.arange(0, BLOCK_SIZE_N)
        w = load_tile(w_columns, rows, N, K, in_columns)
        cast_tile(q_columns, rows, w, scale, N, in_columns, FP8_MAX)


@triton.jit
def _piece(
    number: tl.tensor, N: tl.tensor, K: tl.tensor, ROWS: tl.constexpr, BLOCK_SIZE_K: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The expert (int64), first row and columns of a piece: neighbours read on along K, where memory is contiguous."""
    blocks = tl.cdiv(K, BLOCK_SIZE_K)
    pieces = tl.maximum(tl.cdiv(N, ROWS), 1)  # one that has no row writes the scales of an expert that has none
    columns = number % blocks * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    return (number // blocks // pieces).to(tl.int64), number // blocks % pieces * ROWS, columns


def quantize_transpose_3d_atomic(
    w: torch.Tensor, *, float8_dtype: torch.dtype | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize and transpose each expert's ``w``; returns ``(q, scales)`` of :mod:`fp8tune_kernels.transpose_3d`.

    ``float8_dtype`` None is the format of the running arch (e4m3fnuz on gfx942, else e4m3fn). A NaN in a row of K of
    an expert makes its scale and codes NaN. Zeroes ``4*E*K`` bytes of scratch and launches twice, with the config that
    the exported table has for these sizes, and waits for nothing. On a CPU without Triton's interpreter it runs the
    plain torch reference.

    Raises ValueError, before any launch, for a wrong dtype, rank or stride of ``w``.
    """
    return _operator(w, float8_dtype, power_of_two)


def launch(config: Mapping[str, int], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    """Zeroes the maxima, then launches twice: a program for every piece of every expert."""
    w, float8_dtype, power_of_two = inputs
    E, K, N = w.shape
    rows = max(ROWS_PER_PROGRAM, config["BLOCK_SIZE_N"])
    programs = -(-K // config["BLOCK_SIZE_K"]) * max(1, -(-N // rows)) * E
    if programs:
        amax = torch.zeros(E * K, dtype=torch.int32, device=w.device)
        transpose_3d_amax_kernel[(programs,)](w, amax, N, K, rows, **config)
        transpose_3d_cast_kernel[(programs,)](
            w, amax, *outputs, N, K, FP8_MAX[float8_dtype], power_of_two, rows, **config
        )


def scaled_down(problem: Problem) -> Problem:
    """At most 2 experts of 523 rows of 101: no block divides either, and an expert has several pieces."""
    return weights.scaled_down(problem, E=2, N=523, K=101)


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None."""
    threads = config["num_warps"] * limits.warp_size
    values = config["BLOCK_SIZE_N"] * config["BLOCK_SIZE_K"] // threads
    staged = 2 * config["BLOCK_SIZE_N"] * config["BLOCK_SIZE_K"] * (config["num_stages"] - 1)
    if threads > limits.max_threads_per_block:
        return f"{threads} threads a block, {limits.arch} has at most {limits.max_threads_per_block}"
    if config["BLOCK_SIZE_N"] >= ROWS_PER_PROGRAM and config["num_stages"] > 1:
        return "same as num_stages=1: a program has one tile"
    if values < 16:
        return f"{values} values a thread: too few for one 16-byte store of FP8"
    if values > 128:
        return f"{values} values a thread: the tile and its maxima do not fit in registers"
    if staged > limits.shared_bytes_per_block:
        room = limits.shared_bytes_per_block
        return f"{staged} bytes of tiles in flight, {limits.arch} has {room} of shared memory a block"
    for size, dim in (("BLOCK_SIZE_N", "N"), ("BLOCK_SIZE_K", "K")):
        if config[size] >= 2 * shape[dim]:
            return f"{size}={config[size]} for {dim}={shape[dim]}: half of the threads idle"
    return None


SPEC = KernelSpec(
    name="transpose-3d-atomic",
    axes={
        "BLOCK_SIZE_N": (32, 64, 128, 256),
        "BLOCK_SIZE_K": (32, 64, 128, 256),
        "num_warps": (2, 4, 8, 16),
        "num_stages": (1, 2, 4),
    },
    default=NamedInts(BLOCK_SIZE_N=128, BLOCK_SIZE_K=64, num_warps=8, num_stages=1),
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
    "quantize_transpose_3d_atomic(Tensor w, ScalarType? float8_dtype, bool power_of_two) -> (Tensor, Tensor)",
    weights.arguments,
    weights.key,
)
