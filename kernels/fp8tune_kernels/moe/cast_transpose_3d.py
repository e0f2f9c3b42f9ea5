"""``cast-transpose-3d``: cast expert weights to FP8 and transpose the codes, in one read of the weights.

    q, scales                  what ``colwise-3d`` makes of w.transpose(1, 2): a scale, a power of two, per row
    transposed                 what ``transposed-codes-3d`` makes of q
    with ``one_scale``
    transposed, of_columns     what ``shifted-transpose-3d`` makes of q and scales: a scale per expert

    w           (E, N, K), row-major, bfloat16, float16 or float32; N is a multiple of 16
    q           (E, K, N), strides (K*N, 1, K), FP8
    scales      (E, 1, N), float32
    transposed  (E, N, K), strides (N*K, 1, N), FP8
    of_columns  (E, K), float32; no element without ``one_scale``

A program casts a few rows, or transposes a tile of codes that others have cast. Programs draw their task when they
begin, in this order: rows of one unit are cast while those of an earlier one, LAG units before, are transposed. So
codes are read while L2 has them, and a program only waits for programs that run already. A unit is an expert where all
its rows have one scale, else a stripe of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..edges import edge, past_half
from ..inputs import dtype_named
from ..quantize import colwise_3d, transposed_codes_3d
from ..quantize.arithmetic import magnitude, magnitude_to_float32, quantize, scale_of
from ..quantize.factors import random_powers
from ..quantize.limits import MOST_VALUES, idle_columns, wrong_tile
from ..quantize.transposed_codes import shifted_bytes, words_of_bytes
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits, NamedInts, Problem
from . import shifted_transpose_3d

STRIPE = 4
"""Tiles of rows of a unit that is no whole expert."""

MOST_COLUMNS = 8192
"""Of rows that are read once; longer ones are read twice."""


class _Weights(NamedTuple):
    """Weights and their copies."""

    w_ptr: tl.tensor  # (E, N, K), row-major
    q_ptr: tl.tensor  # (E, N, K), row-major
    transposed_ptr: tl.tensor  # (E, K, N), row-major
    scales_ptr: tl.tensor  # (E, N)
    of_columns_ptr: tl.tensor  # (E, K), or None
    N: tl.tensor
    K: tl.tensor


@triton.jit(do_not_specialize=["E", "tiles"])  # so that the binary that few experts check is the one that many run
def cast_transpose_3d_kernel(
    w_ptr: tl.tensor,
    q_ptr: tl.tensor,
    transposed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    of_columns_ptr: tl.tensor,
    state_ptr: tl.tensor,  # zeros: tasks that were drawn; rows that were cast, by unit; infinity less least, by expert
    E: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    tiles: tl.tensor,  # of BLOCK_SIZE_M rows in a unit
    FP8_MAX: tl.constexpr,
    WIDTH: tl.constexpr,  # columns that are cast at a time
    ONE_PASS: tl.constexpr,  # they are all
    ROWS: tl.constexpr,  # of a program that casts
    BLOCK_SIZE_M: tl.constexpr,  # of N
    BLOCK_SIZE_K: tl.constexpr,
    LAG: tl.constexpr,
) -> None:
    """Do one task."""
    weights = _Weights(w_ptr, q_ptr, transposed_ptr, scales_ptr, of_columns_ptr, N, K)
    units_of_expert, across = tl.cdiv(N, tiles * BLOCK_SIZE_M), tl.cdiv(K, BLOCK_SIZE_K)
    units, casts = E * units_of_expert, tiles * (BLOCK_SIZE_M // ROWS)
    done_ptr, least_ptr = state_ptr + 1, state_ptr + 1 + units
    task = tl.atomic_add(state_ptr, 1)
    step, place = task // (casts + tiles * across), task % (casts + tiles * across)
    cast = place * casts // (casts + tiles * across)  # both kinds in turn
    if (place + 1) * casts // (casts + tiles * across) > cast:
        if step < units:
            expert, row = step // units_of_expert, step % units_of_expert * tiles * BLOCK_SIZE_M + cast * ROWS
            least = _cast_rows(weights, expert, row, FP8_MAX, WIDTH, ONE_PASS, ROWS)
            if of_columns_ptr is not None:
                tl.atomic_max(least_ptr + expert, 0x7F800000 - least.to(tl.int32, bitcast=True), sem="relaxed")
            tl.debug_barrier()  # the stores of other threads come before
            tl.atomic_add(done_ptr + step, 1, sem="release")
    elif step >= LAG:
        unit = step - LAG
        count = tl.atomic_add(done_ptr + unit, 0, sem="acquire")
        while count < casts:
            count = tl.atomic_add(done_ptr + unit, 0, sem="acquire")
        tl.debug_barrier()
        expert, tile = unit // units_of_expert, place - cast
        row = (unit % units_of_expert * tiles + tile // across) * BLOCK_SIZE_M
        if row < N:
            least = tl.cast(1.0, tl.float32)
            if of_columns_ptr is not None:
                least = (0x7F800000 - tl.load(least_ptr + expert)).to(tl.float32, bitcast=True)
                least = tl.where(least < float("inf"), least, 1.0)
            _transpose(weights, expert, row, tile % across * BLOCK_SIZE_K, least, FP8_MAX, BLOCK_SIZE_M, BLOCK_SIZE_K)


@triton.jit
def _cast_rows(
    weights: _Weights,
    expert: tl.tensor,
    row: tl.tensor,
    FP8_MAX: tl.constexpr,
    WIDTH: tl.constexpr,
    ONE_PASS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Cast ROWS rows of an expert and return the least of their scales that are positive and finite, or infinity."""
    rows, lanes = row + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    in_rows, K = (rows < weights.N)[:, None], weights.K
    first = (expert.to(tl.int64) * weights.N + rows)[:, None] * K
    dtype: tl.constexpr = weights.w_ptr.dtype.element_ty
    if ONE_PASS:
        inside = in_rows & (lanes < K)
        values = tl.load(weights.w_ptr + first + lanes, mask=inside, other=0.0, eviction_policy="evict_first")
        largest = magnitude(values)
    else:
        largest = magnitude(tl.zeros((ROWS, WIDTH), dtype))
        for column in tl.range(0, K, WIDTH, num_stages=1):
            inside = in_rows & (column + lanes < K)
            values = tl.load(weights.w_ptr + first + column + lanes, mask=inside, other=0.0)
            largest = tl.maximum(largest, magnitude(values))
    scale = scale_of(magnitude_to_float32(tl.max(largest, 1), dtype), FP8_MAX, True)
    tl.store(weights.scales_ptr + expert * weights.N + rows, scale, mask=rows < weights.N)
    if ONE_PASS:
        codes = quantize(values, scale[:, None], weights.q_ptr.dtype.element_ty, FP8_MAX)
        tl.store(weights.q_ptr + first + lanes, codes, mask=inside)
    else:
        for column in tl.range(0, K, WIDTH, num_stages=1):
            inside = in_rows & (column + lanes < K)
            values = tl.load(weights.w_ptr + first + column + lanes, mask=inside, other=0.0)
            codes = quantize(values, scale[:, None], weights.q_ptr.dtype.element_ty, FP8_MAX)
            tl.store(weights.q_ptr + first + column + lanes, codes, mask=inside)
    infinity = float("inf")
    is_usable = (rows < weights.N) & (scale > 0) & (scale < infinity)
    return tl.min(tl.where(is_usable, scale, infinity), 0)


@triton.jit
def _transpose(
    weights: _Weights,
    expert: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    least: tl.tensor,
    FP8_MAX: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """Transpose a tile of codes as words of four rows."""
    words, columns = tl.arange(0, BLOCK_SIZE_M // 4), column + tl.arange(0, BLOCK_SIZE_K)
    expert, K = expert.to(tl.int64), weights.K
    packed = words_of_bytes(
        _codes(weights, expert, row, words * 4, columns, least, FP8_MAX),
        _codes(weights, expert, row, words * 4 + 1, columns, least, FP8_MAX),
        _codes(weights, expert, row, words * 4 + 2, columns, least, FP8_MAX),
        _codes(weights, expert, row, words * 4 + 3, columns, least, FP8_MAX),
    )
    stride = weights.N // 16 * 4  # N is a multiple of 16: the compiler learns it
    to_ptr = weights.transposed_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + (expert * K * stride + row // 4)
    inside = (words // 4 * 16 < weights.N - row)[:, None] & (columns < K)[None, :]
    tl.store(to_ptr + words[:, None] + columns.to(tl.int64)[None, :] * stride, packed, mask=inside)
    if weights.of_columns_ptr is not None and row == 0:
        of_all = tl.full((BLOCK_SIZE_K,), 0.0, tl.float32) + least
        tl.store(weights.of_columns_ptr + expert * K + columns, of_all, mask=columns < K)


@triton.jit
def _codes(
    weights: _Weights,
    expert: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    least: tl.tensor,
    FP8_MAX: tl.constexpr,
) -> tl.tensor:
    """Read codes of some rows, shifted, as bytes."""
    is_row, K = rows < weights.N - row, weights.K
    dtype: tl.constexpr = weights.q_ptr.dtype.element_ty
    from_ptr = weights.q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + (expert * weights.N + row) * K
    inside = is_row[:, None] & (columns < K)[None, :]
    codes = tl.load(from_ptr + (rows[:, None] * K + columns[None, :]), mask=inside, other=0)
    if weights.of_columns_ptr is None:
        return codes
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        scale = tl.load(weights.scales_ptr + expert * weights.N + row + rows, mask=is_row, other=1.0)
        return shifted_bytes(codes, (least * _inverse_of(scale))[:, None], dtype, FP8_MAX)


@triton.jit
def _inverse_of(scale: tl.tensor) -> tl.tensor:
    """Return 1 / scale of powers of two, of 0 and of NaN: a division takes a dozen instructions."""
    inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.where(scale > 0, inverse, tl.where(scale == 0, float("inf"), scale))


def launch(config: Config, call: Call) -> None:
    """Launch one program per task, on a state of zeros."""
    E, N, K = call.E, call.N, call.K
    if not E * N * K:
        return
    tiles = -(-N // config["BLOCK_SIZE_M"])
    tiles = tiles if call.one_scale else min(tiles, STRIPE)
    units, width = E * -(-N // (tiles * config["BLOCK_SIZE_M"])), width_of(K)
    tile = {**config, "ROWS": rows_of(config, K)}
    tasks = tiles * (config["BLOCK_SIZE_M"] // tile["ROWS"] + -(-K // config["BLOCK_SIZE_K"]))
    state = torch.zeros(1 + units + E, dtype=torch.int32, device=call.device)
    constants = {"WIDTH": width, "ONE_PASS": width >= K}
    programs = (units + config["LAG"]) * tasks
    call.run(cast_transpose_3d_kernel, programs, tile, state=state, tiles=tiles, **constants)


def reference(call: Call) -> None:
    """Cast and transpose in plain torch."""
    q, scales = colwise_3d.SPEC.reference(call.w.mT, call.float8_dtype, True)
    if call.one_scale:
        transposed, of_columns = shifted_transpose_3d.SPEC.reference(q, scales)
        call.of_columns.copy_(of_columns)
    else:
        (transposed,) = transposed_codes_3d.SPEC.reference(q)
    call.scales.copy_(scales)
    for result, codes in ((call.q, q), (call.transposed, transposed)):
        result.view(torch.uint8).copy_(codes.view(torch.uint8))


def inputs(problem: Problem, device: str) -> dict[str, Any]:
    """Return random weights whose experts differ in their least scale."""
    w = WEIGHTS.random(problem, device) * random_powers(problem, (problem.shape["E"], 1, 1), device, 0, 6)
    return {"w": w.to(dtype_named(problem.in_dtype))}


def width_of(K: int) -> int:
    """Return how many columns are cast at a time."""
    return min(1 << max(K - 1, 0).bit_length(), MOST_COLUMNS)


def rows_of(config: Config, K: int) -> int:
    """Return how many rows a program casts: ROWS, or fewer where their values do not fit in registers."""
    most = config["num_warps"] * 32 * MOST_VALUES // width_of(K)
    return min(config["ROWS"], 1 << max(most, 1).bit_length() - 1)


def problems(row: Shape) -> Iterator[NamedInts]:
    """Yield the weights of a row's layer with a scale per row, as those of gate and up, and with one scale, as of down.

    A row with ``one_scale`` has the latter alone.
    """
    if row["N"] % 16 == 0:
        for one_scale in (1,) if row.get("one_scale") else (0, 1):
            yield NamedInts(E=row["E"], N=row["N"], K=row["K"], one_scale=one_scale)


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    if config == DEFAULT:
        return None
    if (rows := rows_of(config, shape["K"])) < config["ROWS"]:
        return f"same binary as ROWS={rows}: more do not fit in registers"
    return (
        wrong_tile(config, rows * width_of(shape["K"]), limits, least=8, too_few="too few loads")
        or wrong_tile(config, config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_K"], limits)
        or idle_columns(config["BLOCK_SIZE_K"], shape["K"])
    )


def check(N: int) -> None:
    """Raise ValueError unless columns of the codes are whole words."""
    if N % 16:
        raise ValueError(f"w must have a multiple of 16 rows, got N={N}")


DEFAULT = {"ROWS": 8, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 128, "LAG": 8, "num_warps": 4, "num_stages": 1}
WEIGHTS = declare.weights(as_stored=True)

SPEC = declare.kernel(
    name="cast-transpose-3d",
    arguments=(WEIGHTS, declare.flag("one_scale"), declare.FLOAT8_DTYPE),
    outputs=(
        declare.fp8("q", "E", "K", "N", transposed=True),
        declare.float32("scales", "E", "1", "N"),
        declare.fp8("transposed", "E", "N", "K", transposed=True),
        declare.float32("of_columns", "E", "K", requested_by="one_scale"),
    ),
    check=check,
    inputs=inputs,
    launch=launch,
    reference=reference,
    axes={
        "ROWS": (1, 2, 4, 8, 16),
        "BLOCK_SIZE_M": (128,),
        "BLOCK_SIZE_K": (64, 128),
        "LAG": (2, 4, 8),
        "num_warps": (4, 8),
        "num_stages": (1,),
    },
    default=DEFAULT,
    key=("E", "K", "N", "one_scale"),
    problems=problems,
    interpreted={"E": 2, "N": 144, "K": 101},  # no block divides either; an expert has several tiles
    invalid=invalid,
    edges=(
        edge("a block and 16 more, NaN", "nan", E=2, N=272, K=80),
        edge("a few rows, infinity", "infinite", E=2, N=48, K=272),
        edge("zeros", "zeros", E=1, N=16, K=48),
        edge("the least rows, huge values", "huge", E=3, N=16, K=37),
        edge("one column, tiny values", "tiny", E=2, N=272, K=1),
        edge("a unit and one more past an aligned address", offset=1, E=1, N=528, K=past_half("K")),
        edge("rows that are read twice, one scale", E=2, N=48, K=MOST_COLUMNS + 65, one_scale=1),
        edge("a scale a row", E=3, N=272, K=80, one_scale=0),
    ),
)

cast_and_transpose = SPEC.define("cast_and_transpose")
