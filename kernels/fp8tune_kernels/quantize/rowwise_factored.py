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

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl

from ..catalog import SPANS
from ..edges import declared, edge, long_tail, past_half
from ..groups import padded_rows
from ..inputs import dtype_named, offsets, random_matrix
from ..runtime.checks import check_matrix, check_offsets, fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import SCALE_MODES, DeviceLimits, KernelSpec, NamedInts, Problem, bucket
from . import colwise, rowwise_2d, whole_rows
from .aligned_blocks import ALIGNMENT, block_at, largest_of_rows
from .arithmetic import FP8_MAX, quantize, reference_cast, reference_scale, scale_of
from .factors import check_scales, factor_of, random_powers, reference_factor
from .limits import too_many_shared_bytes, wrong_tile

__all__ = ["SPEC", "quantize_rowwise_factored"]


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


def quantize_rowwise_factored(
    x: torch.Tensor,
    offs: torch.Tensor,
    column_scales: torch.Tensor,
    *,
    float8_dtype: torch.dtype | None = None,
    power_of_two: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` over the column scales row by row; returns ``(q, scales)`` as the module and the package say."""
    return _operator(x, offs, column_scales, float8_dtype, power_of_two)


def reference(
    x: torch.Tensor, offs: torch.Tensor, column_scales: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool
) -> Tensors:
    """The same in plain torch, a group at a time; reads ``offs`` on the host."""
    (M, K), G = x.shape, offs.shape[0]
    q, scales = outputs(x, offs, column_scales, float8_dtype, power_of_two)
    start = 0
    for group, end in enumerate([*offs.tolist(), M]):
        y = x[start:end].float()
        if group < G:
            y = y * reference_factor(column_scales.reshape(G, K)[group])
        largest = y.abs().amax(1, keepdim=True) if K else y.new_zeros(len(y), 1)
        scales[start:end] = reference_scale(largest, float8_dtype, power_of_two)
        q[start:end] = reference_cast(y, scales[start:end], float8_dtype)
        start = end
    return q, scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, offs, column_scales, float8_dtype, power_of_two)`` of a problem."""
    M, K, G = (problem.shape[dim] for dim in "MKG")
    x, column_scales = random_matrix(problem, M, K, device), random_powers(problem, (G, 1, K), device, -6, 12)
    is_power_of_two = problem.scale_mode == "power-of-two"
    return x, offsets(problem, device), column_scales, dtype_named(problem.fp8_dtype), is_power_of_two


def constrain(inputs: Inputs) -> None:
    """Scales are those of usual weights: what else was written into them would be in every code, and hide the rest."""
    scales = inputs[2]
    if scales.device.type != "meta":
        scales[~((scales > 2.0**-32) & (scales < 2.0**32))] = 1.0


def outputs(
    x: torch.Tensor, offs: torch.Tensor, column_scales: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool
) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    return rowwise_2d.outputs(x, float8_dtype, power_of_two)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch: a program for every BLOCK_SIZE_M places. Rows longer than TILE are walked twice, without stages."""
    x, offs, column_scales, float8_dtype, power_of_two = inputs
    (M, K), G = x.shape, offs.shape[0]
    if not M:
        return
    is_whole = config["TILE"] >= K
    constants = (FP8_MAX[float8_dtype], power_of_two, is_whole, *_tile_of(config, K))
    options = whole_rows.options(
        {**config, "num_stages": config["num_stages"] if is_whole else 1}, K, x.element_size() // 2, x.device
    )
    programs = padded_rows(M, G, ALIGNMENT) // config["BLOCK_SIZE_M"]
    tensors = (x, offs, column_scales, *outputs)
    launch_kernel(rowwise_factored_kernel, programs, tensors, (M, K, G), constants, options)


def _tile_of(config: Mapping[str, int], K: int) -> tuple[int, bool, int]:
    """As :func:`.whole_rows.tile_of`, of a part of a row where TILE is shorter."""
    return whole_rows.tile_of(config, K) if config["TILE"] >= K else (config["TILE"], False, 1)


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The output's gradient, ``(M, N)``; ``G = E``."""
    yield NamedInts(M=row["M"], K=row["N"], G=row["E"])


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
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
    held = elements + elements // rows * is_whole  # the factors of columns, too
    return wrong_tile(config, held, limits, too_few="too few loads under way", held="the tile and factors do")


SPEC = KernelSpec(
    name="rowwise-factored",
    axes={
        "BLOCK_SIZE_M": (4, 8, 16, 32),
        "TILE": (2048, 4096, 8192, 16384, 32768),
        "num_warps": (4, 8, 16, 32),
        "num_stages": (1, 3, 4),
    },
    default=NamedInts(BLOCK_SIZE_M=8, TILE=8192, num_warps=8, num_stages=1),
    key=colwise.SPEC.key,
    span=SPANS["rowwise-factored"],
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=constrain,
    interpreted={"M": 29, "K": 5003, "G": 3},  # no block divides either; rows stay longer than the shorter tiles
    invalid=invalid,
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block of rows and one more, long tails", routing="balanced", M=17, K=long_tail("K"), G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=29, K=past_half("K", 16), G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=7, K=past_half("K", 16), G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=5, K=48, G=3),
        edge("one column, tiny values", "tiny", routing="ragged", M=11, K=1, G=2),
        edge(
            "a block of columns and one more past an aligned address",
            offset=1,
            routing="ragged",
            M=5,
            K=past_half("K"),
            G=2,
        ),
        edge("rows of no group", routing="empty", M=29, K=80, G=4),
    ),
    routed=True,
    layout_sizes={"K": 400, "G": 8},
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def arguments(
    x: torch.Tensor,
    offs: torch.Tensor,
    column_scales: torch.Tensor,
    float8_dtype: torch.dtype | None,
    power_of_two: bool,
) -> Inputs:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    check_scales("column_scales", column_scales, offs.shape[0] * x.shape[1], x.device)
    return x, offs, column_scales, fp8_dtype_for(x.device, float8_dtype), power_of_two


def key(x: torch.Tensor, offs: torch.Tensor, *rest: object) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1], offs.shape[0]


_operator = register(SPEC, quantize_rowwise_factored, arguments, key)
