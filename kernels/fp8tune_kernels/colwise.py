"""``colwise``: quantize an ``(M, K)`` matrix to FP8 with one scale per group of rows and column, transposed in memory.

    amax[g, k]      = max over rows m of group g of |x[m, k]|
    scales[g*K + k] = scale of amax[g, k]                                see :mod:`fp8tune_kernels.arithmetic`
    q[m, k]         = fp8(clamp(x[m, k] * scales[g*K + k]))              for m in group g; 0 in rows of no group

    x       (M, K), row-major, bfloat16, float16 or float32
    offs    (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    q       (M, K), strides (1, M rounded up to 16): the column-major operand of a scaled grouped GEMM
    scales  (G*K,), float32, group-major; a GEMM is given the reciprocals

The weight gradient of a grouped GEMM, ``grad.t() @ A`` of each group, contracts over the group's rows: both of its
operands are quantized this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from fp8tune_kernels.arithmetic import (
    FP8_MAX,
    magnitude_to_float32,
    quantize,
    reference_cast,
    reference_scale,
    scale_of,
)
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.ops import check_matrix, check_offsets, fp8_dtype_for, register
from fp8tune_kernels.spec import DeviceLimits, KernelSpec, NamedInts, Problem, bucket
from fp8tune_kernels.tiles import fold, folded_rows, of_any_layout

__all__ = ["SPEC", "quantize_colwise"]


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def colwise_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    q_ptr: tl.tensor,  # (M, K), strides (1, M rounded up to 16)
    scales_ptr: tl.tensor,  # (G * K,), group-major
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    num_warps: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """A program for every BLOCK_SIZE columns of every group, and of the padding rows after the last one."""
    quantize_group_columns(
        x_ptr,
        offs_ptr,
        q_ptr,
        scales_ptr,
        M,
        K,
        G,
        tl.cdiv(M, 16) * 16,
        tl.program_id(0),
        FP8_MAX,
        POWER_OF_TWO,
        BLOCK_SIZE,
        BLOCK_SIZE_ITER,
        num_warps,
        num_stages,
    )


@triton.jit
def quantize_group_columns(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    q_ptr: tl.tensor,  # (M, K), strides (1, q_stride)
    scales_ptr: tl.tensor,  # (G * K,), group-major
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    q_stride: tl.tensor,
    program: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    num_warps: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program of ``cdiv(K, BLOCK_SIZE) * (G + 1)``: BLOCK_SIZE columns of one group, or (``group == G``) of the
    padding rows.

    It walks the rows twice, BLOCK_SIZE_ITER at a time: for the maxima, then backwards for the cast, so that the rows
    read last are found in the cache. Tiles start at multiples of 16 rows wherever the group starts, which makes
    16-byte stores where q_stride is a multiple of 16.
    """
    blocks = tl.cdiv(K, BLOCK_SIZE)
    group = program // blocks
    columns = program % blocks * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    in_columns = (columns < K)[None, :]
    x_columns = x_ptr + columns[None, :]

    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group, mask=group < G, other=M)
    read_end = tl.where(group < G, end, start)  # the padding rows are not read: they become the code of 0
    first = start // 16 * 16
    tiles = tl.cdiv(end - first, BLOCK_SIZE_ITER)

    largest = tl.zeros((folded_rows(BLOCK_SIZE_ITER, BLOCK_SIZE, num_warps), BLOCK_SIZE), tl.int32)
    for tile in tl.range(0, tl.cdiv(read_end - first, BLOCK_SIZE_ITER), num_stages=num_stages):
        rows = first + tile * BLOCK_SIZE_ITER + tl.arange(0, BLOCK_SIZE_ITER)
        largest = fold(largest, _load_rows(x_columns, rows, K, start, read_end, in_columns))
    amax = magnitude_to_float32(tl.max(largest, 0), x_ptr.dtype.element_ty)
    scale = scale_of(amax, FP8_MAX, POWER_OF_TWO)
    tl.store(scales_ptr + group.to(tl.int64) * K + columns, scale, mask=columns < tl.where(group < G, K, 0))

    scale = of_any_layout(scale)
    # Whole chunks of 16 rows first: a mask that is constant over each keeps the stores 16 bytes wide.
    aligned = q_stride % 16 == 0
    q_columns = q_ptr + columns.to(tl.int64)[None, :] * (q_stride // 16 * 16)
    for tile in tl.range(0, tl.where(aligned, tiles, 0), num_stages=num_stages):
        rows = first + (tiles - 1 - tile) * BLOCK_SIZE_ITER + tl.arange(0, BLOCK_SIZE_ITER)
        x = _load_rows(x_columns, rows, K, start, read_end, in_columns)
        q = quantize(x, scale[None, :], q_ptr.dtype.element_ty, FP8_MAX)
        chunks = rows // 16 * 16
        whole = (chunks >= start) & (chunks + 16 <= end)
        tl.store(q_columns + rows[:, None], q, mask=whole[:, None] & in_columns)
    # Then byte by byte the chunks shared with a neighbour, at most one at either end; all where columns are unaligned.
    if (start % 16 != 0) | (end % 16 != 0) | (q_stride % 16 != 0):
        q_bytes = q_ptr + columns.to(tl.int64)[None, :] * q_stride
        chunks = tl.cdiv(end - first, 16)
        for chunk in tl.range(0, chunks, tl.where(aligned, tl.maximum(chunks - 1, 1), 1)):
            rows = first + chunk * 16 + tl.arange(0, 16)
            x = _load_rows(x_columns, rows, K, start, read_end, in_columns)
            q = quantize(x, scale[None, :], q_ptr.dtype.element_ty, FP8_MAX)
            inside = (rows >= start) & (rows < end)
            tl.store(q_bytes + rows[:, None], q, mask=inside[:, None] & in_columns)


@triton.jit
def _load_rows(
    x_columns: tl.tensor, rows: tl.tensor, K: tl.tensor, start: tl.tensor, end: tl.tensor, in_columns: tl.tensor
) -> tl.tensor:
    """The tile of x in these rows, zero outside [start, end)."""
    inside = ((rows >= start) & (rows < end))[:, None] & in_columns
    return tl.load(x_columns + rows.to(tl.int64)[:, None] * K, mask=inside, other=0.0)


def quantize_colwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    float8_dtype: torch.dtype | None = None,
    power_of_two: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each group of rows of ``x`` column by column; returns ``(q, scales)`` as the module's docstring says.

    ``float8_dtype`` None is the format of the running arch (e4m3fnuz on gfx942, else e4m3fn). A NaN in a column of a
    group makes its scale and codes NaN. Launches once, with the config that the exported table has for these sizes,
    and waits for nothing: the values in ``offs`` are not checked. On a CPU without Triton's interpreter it runs
    :func:`reference`.

    Raises ValueError, before any launch, for a wrong dtype, rank, stride or device of ``x`` or ``offs``.
    """
    return _operator(x, offs, float8_dtype, power_of_two)


def reference(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch, a group at a time; reads ``offs`` on the host."""
    K = x.shape[1]
    q, scales = outputs(x, offs, float8_dtype, power_of_two)
    start = 0
    for group, end in enumerate(offs.tolist()):
        rows = x[start:end]
        amax = rows.abs().amax(0).float() if len(rows) else rows.new_zeros(K, dtype=torch.float32)
        scale = reference_scale(amax, float8_dtype, power_of_two)
        scales[group * K : (group + 1) * K] = scale
        q[start:end] = reference_cast(rows, scale, float8_dtype)
        start = end
    q[start:].zero_()
    return q, scales


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    """``(x, offs, float8_dtype, power_of_two)`` of a problem."""
    x = random_matrix(problem, problem.shape["M"], problem.shape["K"], device)
    return x, offsets(problem, device), dtype_named(problem.fp8_dtype), problem.scale_mode == "power-of-two"


def outputs(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised ``q`` and ``scales``."""
    M, K = x.shape
    q = torch.empty_strided((M, K), (1, (M + 15) // 16 * 16), dtype=float8_dtype, device=x.device)
    return q, torch.empty(offs.shape[0] * K, dtype=torch.float32, device=x.device)


def launch(config: Mapping[str, int], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    """One launch: a program for every block of columns of every group, and of the padding rows."""
    x, offs, float8_dtype, power_of_two = inputs
    M, K = x.shape
    G = offs.shape[0]
    programs = -(-K // config["BLOCK_SIZE"]) * (G + 1)
    if programs:
        colwise_kernel[(programs,)](x, offs, *outputs, M, K, G, FP8_MAX[float8_dtype], power_of_two, **config)


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """Both operands of the weight gradient: A is ``(M, K)``, the output's gradient ``(M, N)``; ``G = E``.

    The w2 row of a layer has the K and N of its w1 and w3 row exchanged, and so the same two problems.
    """
    yield NamedInts(M=row["M"], K=row["K"], G=row["E"])
    yield NamedInts(M=row["M"], K=row["N"], G=row["E"])


def scaled_down(problem: Problem) -> Problem:
    """At most 3 groups, 157 rows and 101 columns: one group stays one, several stay several, no block divides a dim."""
    sizes = {"M": 157, "K": 101, "G": 3}
    return replace(problem, shape=NamedInts([(dim, min(size, sizes[dim])) for dim, size in problem.shape.items()]))


def bytes_moved(shape: Mapping[str, int]) -> int:
    """Two bytes read and one written for every element; scales and offsets are too few to count."""
    return 3 * shape["M"] * shape["K"]


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None."""
    threads = config["num_warps"] * limits.warp_size
    values = config["BLOCK_SIZE"] * config["BLOCK_SIZE_ITER"] // threads
    staged = 2 * config["BLOCK_SIZE"] * config["BLOCK_SIZE_ITER"] * config["num_stages"]
    if threads > limits.max_threads_per_block:
        return f"{threads} threads a block, {limits.arch} has at most {limits.max_threads_per_block}"
    if values < 16:
        return f"{values} values a thread: too few for one 16-byte store of FP8"
    if values > 128:
        return f"{values} values a thread: the tile and its maxima do not fit in registers"
    if config["num_stages"] > 1 and staged > limits.shared_bytes_per_block:
        room = limits.shared_bytes_per_block
        return f"{staged} bytes of tiles in flight, {limits.arch} has {room} of shared memory a block"
    if config["BLOCK_SIZE"] >= 2 * shape["K"]:
        return f"{config['BLOCK_SIZE']} columns a block for {shape['K']}: half of the threads idle"
    return None


SPEC = KernelSpec(
    name="colwise",
    axes={
        "BLOCK_SIZE": (16, 32, 64, 128, 256),
        "BLOCK_SIZE_ITER": (32, 64, 128, 256, 512),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 4),
    },
    default=NamedInts(BLOCK_SIZE=32, BLOCK_SIZE_ITER=128, num_warps=4, num_stages=1),
    key=("M_bucket", "K", "G"),
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    bytes_moved=bytes_moved,
    scaled_down=scaled_down,
    invalid=invalid,
    routed=True,
)


def _arguments(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype | None, power_of_two: bool
) -> tuple[Any, ...]:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    return x, offs, fp8_dtype_for(x.device, float8_dtype), power_of_two


def _key(x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1], offs.shape[0]


_operator: Callable[..., tuple[torch.Tensor, torch.Tensor]] = register(
    SPEC,
    "quantize_colwise(Tensor x, Tensor offs, ScalarType? float8_dtype, bool power_of_two) -> (Tensor, Tensor)",
    _arguments,
    _key,
)
