"""``rowwise-factored``: quantize an output's gradient row by row, with the scales of the weights folded in.

    y[m, k]   = x[m, k] * factor(column_scales[g, k])         for m in group g; x[m, k] in rows of no group
    scales[m] = scale of max over k of |y[m, k]|              see :mod:`.arithmetic`
    q[m, k]   = fp8(clamp(y[m, k] * scales[m]))

    x              (M, K), row-major, bfloat16, float16 or float32
    offs           (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    column_scales  G*K contiguous values of float32, such as (G, 1, K): the scales of ``colwise-3d``, powers of two
    q              (M, K), row-major: the left operand of a grouped GEMM that contracts over K
    scales         (M, 1), float32; a GEMM is given the reciprocals

``factor`` is that of :mod:`.factors`. Products are float32, and exact unless they leave its range: they are then
infinite, subnormal or zero. Maxima below 1e-12 have the scale of 1e-12, as anywhere.

It is the cast of the input gradient's left operand, whose right one is the transposed codes of the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import edge, long_tail, past_half
from ..groups import padded_rows
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits, Problem
from . import colwise, whole_rows
from .aligned_blocks import ALIGNMENT, block_at, largest_of_rows
from .arithmetic import quantize, reference_cast, reference_scale, scale_of
from .factors import factor_of, random_powers, reference_factor
from .limits import too_many_shared_bytes, wrong_tile


@triton.jit(do_not_specialize=["M", "G"])  # they change every step: neither may recompile anything
def rowwise_factored_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    column_scales_ptr: tl.tensor,  # (G, K)
    q_ptr: tl.tensor,  # (M, K), row-major
    scales_ptr: tl.tensor,  # (M, 1)
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ONE_PASS: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of the first tile; a second of half as many may follow
    HAS_REST: tl.constexpr,
    ROWS: tl.constexpr,  # that are cast at a time
    BLOCK_SIZE_M: tl.constexpr,  # places of a program
    num_stages: tl.constexpr,
) -> None:
    """One program: a block of rows of one group (:mod:`.aligned_blocks`).

    Where a tile holds a whole row, it is read once, and the group's factors are read once a block. Else each row is
    walked twice, the second time backwards, so that the columns read last are found in the cache.
    """
    block = block_at(offs_ptr, M, G, tl.program_id(0) * BLOCK_SIZE_M, BLOCK_SIZE_M)
    lanes, columns, others = tl.arange(0, ROWS), tl.arange(0, WIDTH), WIDTH + tl.arange(0, WIDTH // 2)
    column_scales = column_scales_ptr + block.group.to(tl.int64) * K
    is_divided = (block.group < G) & (block.rows > 0)
    if ONE_PASS:
        factors = _factors(column_scales, K, is_divided, columns)
        if HAS_REST:
            factors_rest = _factors(column_scales, K, is_divided, others)
        for number in tl.range(0, tl.cdiv(block.rows, ROWS), num_stages=num_stages):
            row = block.first + number * ROWS
            in_rows = number * ROWS + lanes < block.rows
            y = _load(x_ptr, K, row, in_rows, lanes, columns) * factors
            largest = largest_of_rows(y)
            if HAS_REST:
                y_rest = _load(x_ptr, K, row, in_rows, lanes, others) * factors_rest
                largest = tl.maximum(largest, largest_of_rows(y_rest))
            scale = scale_of(largest.to(tl.float32, bitcast=True), FP8_MAX, POWER_OF_TWO)
            tl.store(scales_ptr + row + lanes, scale, mask=in_rows)
            _store(q_ptr, y, scale, FP8_MAX, K, row, in_rows, lanes, columns)
            if HAS_REST:
                _store(q_ptr, y_rest, scale, FP8_MAX, K, row, in_rows, lanes, others)
    else:
        tiles = tl.cdiv(K, WIDTH)
        for number in range(block.rows):
            row = block.first + number
            in_rows = number + lanes < block.rows
            largest = tl.zeros((ROWS,), tl.int32)
            for tile in tl.range(0, tiles, num_stages=1):
                at = tile * WIDTH + columns
                y = _load(x_ptr, K, row, in_rows, lanes, at) * _factors(column_scales, K, is_divided, at)
                largest = tl.maximum(largest, largest_of_rows(y))
            scale = scale_of(largest.to(tl.float32, bitcast=True), FP8_MAX, POWER_OF_TWO)
            tl.store(scales_ptr + row + lanes, scale, mask=in_rows)
            for tile in tl.range(0, tiles, num_stages=1):
                at = (tiles - 1 - tile) * WIDTH + columns
                y = _load(x_ptr, K, row, in_rows, lanes, at) * _factors(column_scales, K, is_divided, at)
                _store(q_ptr, y, scale, FP8_MAX, K, row, in_rows, lanes, at)


@triton.jit
def _factors(column_scales: tl.tensor, K: tl.tensor, is_divided: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """The factors of the block's group, (1, columns): 1 for rows of no group."""
    inside = (columns < K) & is_divided
    return factor_of(tl.load(column_scales + columns, mask=inside, other=1.0))[None, :]


@triton.jit
def _load(
    x_ptr: tl.tensor, K: tl.tensor, row: tl.tensor, in_rows: tl.tensor, lanes: tl.tensor, columns: tl.tensor
) -> tl.tensor:
    """A tile of x as float32, zeros outside."""
    at = x_ptr + row.to(tl.int64) * K + (lanes[:, None] * K + columns[None, :])
    inside = in_rows[:, None] & (columns < K)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _store(
    q_ptr: tl.tensor,
    y: tl.tensor,
    scale: tl.tensor,
    FP8_MAX: tl.constexpr,
    K: tl.tensor,
    row: tl.tensor,
    in_rows: tl.tensor,
    lanes: tl.tensor,
    columns: tl.tensor,
) -> None:
    """The codes of a tile."""
    at = q_ptr + row.to(tl.int64) * K + (lanes[:, None] * K + columns[None, :])
    q = quantize(y, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    tl.store(at, q, mask=in_rows[:, None] & (columns < K)[None, :])


def launch(config: Config, call: Call) -> None:
    """Launch a program per BLOCK_SIZE_M places. Rows longer than TILE are walked twice, without stages."""
    if call.M:
        is_whole = config["TILE"] >= call.K
        width, has_rest, rows = _tile_of(config, call.K)
        options = whole_rows.options(
            {**config, "num_stages": config["num_stages"] if is_whole else 1},
            call.K,
            call.x.element_size() // 2,
            call.device,
        )
        programs = padded_rows(call.M, call.G, ALIGNMENT) // config["BLOCK_SIZE_M"]
        call.run(
            rowwise_factored_kernel, programs, options, ONE_PASS=is_whole, WIDTH=width, HAS_REST=has_rest, ROWS=rows
        )


def _tile_of(config: Config, K: int) -> tuple[int, bool, int]:
    """Return :func:`.whole_rows.tile_of`, or that of a row's part where TILE is shorter."""
    return whole_rows.tile_of(config, K) if config["TILE"] >= K else (config["TILE"], False, 1)


def reference(call: Call) -> None:
    """Quantize the rows of a group at a time in plain torch; reads ``offs`` on the host."""
    start = 0
    for group, end in enumerate([*call.offs.tolist(), call.M]):
        y = call.x[start:end].float()
        if group < call.G:
            y = y * reference_factor(call.column_scales.reshape(call.G, call.K)[group])
        largest = y.abs().amax(1, keepdim=True) if call.K else y.new_zeros(len(y), 1)
        call.scales[start:end] = reference_scale(largest, call.float8_dtype, call.power_of_two)
        call.q[start:end] = reference_cast(y, call.scales[start:end], call.float8_dtype)
        start = end


def random_scales(problem: Problem, device: str) -> torch.Tensor:
    """Return the scales of usual weights."""
    return random_powers(problem, (problem.shape["G"], 1, problem.shape["K"]), device, -6, 12)


def constrain(call: Call) -> None:
    """Keep the scales of usual weights: what else was written into them would be in every code, and hide the rest."""
    scales = call.column_scales
    if scales.device.type != "meta":
        scales[~((scales > 2.0**-32) & (scales < 2.0**32))] = 1.0


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    if config == SPEC.default:
        return None
    K, stages = shape["K"], config["num_stages"]
    width, has_rest, rows = _tile_of(config, K)
    is_whole = config["TILE"] >= K
    if not is_whole and stages != (least := min(SPEC.axes["num_stages"])):
        return f"same binary as num_stages={least}: rows are walked twice, without stages"
    for less in SPEC.axes["TILE"]:
        if K <= less < config["TILE"] and rows == _tile_of({**config, "TILE": less}, K)[2]:
            return f"same binary as TILE={less}: {rows} rows at a time"
    if stages > 1 and limits.arch.startswith("sm_"):
        count = whole_rows.shared_bytes(config, K, 1)
        if reason := too_many_shared_bytes(count, f"of rows in {stages} stages", limits):
            return reason
    elements = (width + width // 2 * has_rest) * rows
    registers = elements + elements // rows * is_whole  # the factors of columns, too
    return wrong_tile(config, registers, limits, too_few="too few loads under way", held="the tile and factors do")


SPEC = declare.kernel(
    name="rowwise-factored",
    arguments=(
        declare.matrix("x", "M", "K"),
        declare.OFFSETS,
        declare.tensor("column_scales", "G * K", random=random_scales),
        declare.FLOAT8_DTYPE,
        declare.POWER_OF_TWO,
    ),
    outputs=(declare.fp8("q", "M", "K"), declare.float32("scales", "M", "1")),
    launch=launch,
    reference=reference,
    constrain=constrain,
    axes={
        "BLOCK_SIZE_M": (4, 8, 16, 32),
        "TILE": (2048, 4096, 8192, 16384, 32768),
        "num_warps": (4, 8, 16, 32),
        "num_stages": (1, 3, 4),
    },
    default={"BLOCK_SIZE_M": 8, "TILE": 8192, "num_warps": 8, "num_stages": 1},
    key=colwise.KEY,
    problems=({"M": "M", "K": "N", "G": "E"},),  # the gradient of the output
    interpreted={"M": 29, "K": 5003, "G": 3},  # no block divides either; rows stay longer than the shorter tiles
    invalid=invalid,
    edges=(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block of rows and one more, long tails", routing="balanced", M=17, K=long_tail("K"), G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=29, K=past_half("K", 16), G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=7, K=past_half("K", 16), G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=5, K=48, G=3),
        edge("one column, tiny values", "tiny", routing="ragged", M=11, K=1, G=2),
        edge("a block and one more past an aligned address", offset=1, routing="ragged", M=5, K=past_half("K"), G=2),
        edge("rows of no group", routing="empty", M=29, K=80, G=4),
    ),
    layout_sizes={"K": 400, "G": 8},
)

quantize_rowwise_factored = SPEC.define()
