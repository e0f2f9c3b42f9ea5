"""A matrix (M, 2N) of gate and up, whose rows kernels hold in registers: tiles, random values, checks, declarations.

layout "halves"       all columns of the gate, and then those of up
layout "interleaved"  gate and up in turn
x_scales              what the rows of codes were multiplied by: powers of two, as ``rowwise-2d`` makes them
bias                  (G, 2N), bfloat16, added to x of bfloat16 and rounded; or None
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..edges import edge, past_half
from ..inputs import dtype_named, random_matrix
from ..runtime import declare
from ..runtime.checks import FP8_DTYPES
from ..runtime.declare import Call, Config, Shape
from ..spec import DTYPE_FLAG, DeviceLimits, NamedInts, Problem
from . import whole_rows
from .arithmetic import quantize, reference_cast, reference_scale
from .gated import ACTIVATIONS, LAYOUTS
from .limits import too_many_shared_bytes, wrong_tile


class Source(NamedTuple):
    """A matrix of gate and up."""

    x_ptr: tl.tensor
    x_scales_ptr: tl.tensor  # or None
    bias_ptr: tl.tensor  # or None
    N: tl.tensor
    INTERLEAVED: tl.constexpr


class Rows(NamedTuple):
    """Rows that are cast at a time."""

    group: tl.tensor
    first: tl.tensor
    lanes: tl.tensor  # added to the first row
    is_written: tl.tensor
    is_read: tl.tensor  # rows of no group are not read: they become zeros
    weights: tl.tensor  # (rows, 1), or None


@triton.jit
def load_gate_and_up(source: Source, rows: Rows, columns: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return some columns of gate and up as float32 that hold values of bfloat16, bias included; zeros outside.

    ``columns`` start at a multiple of their number.
    """
    N, lanes = source.N, rows.lanes
    inside = rows.is_read[:, None] & (columns < N)[None, :]
    x_rows = source.x_ptr + rows.first.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N)
    if source.INTERLEAVED:
        WIDTH: tl.constexpr = columns.shape[0]
        both = tl.min(columns, 0) * 2 + tl.arange(0, 2 * WIDTH)
        both_inside = rows.is_read[:, None] & (both < 2 * N)[None, :]
        x = tl.load(x_rows + both[None, :], mask=both_inside, other=0.0, eviction_policy="evict_first")
        gate, up = tl.split(x.to(tl.float32).reshape(lanes.shape[0], WIDTH, 2))
    else:
        gate = tl.load(x_rows + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        up = tl.load(x_rows + N + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    if source.x_scales_ptr is not None:
        scale = tl.load(source.x_scales_ptr + rows.first + lanes, mask=rows.is_read, other=1.0)
        inverse = _inverse_of(scale)[:, None]
        gate, up = gate * inverse, up * inverse
    if source.bias_ptr is not None:
        of_gate, of_up = columns, N + columns
        if source.INTERLEAVED:
            of_gate, of_up = 2 * columns, 2 * columns + 1
        bias = source.bias_ptr + rows.group.to(tl.int64) * (2 * N)
        is_read = (tl.max(rows.is_read.to(tl.int32), 0) > 0) & (columns < N)
        gate += tl.load(bias + of_gate, mask=is_read, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + of_up, mask=is_read, other=0.0).to(tl.float32)[None, :]
        gate = tl.where(inside, gate.to(tl.bfloat16).to(tl.float32), 0.0)
        up = tl.where(inside, up.to(tl.bfloat16).to(tl.float32), 0.0)
    return gate, up


@triton.jit
def _inverse_of(scale: tl.tensor) -> tl.tensor:
    """1 / scale: exact of powers of two, of others to 2**-23. A division has a branch, which loads do not pass."""
    if is_cuda():
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def store_gate_and_up(
    q_ptr: tl.tensor,
    source: Source,
    rows: Rows,
    columns: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    scale: tl.tensor,
    FP8_MAX: tl.constexpr,
) -> None:
    """Store codes of both, with a scale per row, in the layout of the source."""
    N, lanes = source.N, rows.lanes
    q_rows = q_ptr + rows.first.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N)
    gate = quantize(gate, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    up = quantize(up, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    if source.INTERLEAVED:
        WIDTH: tl.constexpr = columns.shape[0]
        both = tl.min(columns, 0) * 2 + tl.arange(0, 2 * WIDTH)
        codes = tl.join(gate, up).reshape(lanes.shape[0], 2 * WIDTH)
        tl.store(q_rows + both[None, :], codes, mask=rows.is_written[:, None] & (both < 2 * N)[None, :])
    else:
        inside = rows.is_written[:, None] & (columns < N)[None, :]
        tl.store(q_rows + columns[None, :], gate, mask=inside)
        tl.store(q_rows + N + columns[None, :], up, mask=inside)


def launch(config: Config, call: Call, kernel: Any, programs: int, matrices: int, **values: Any) -> None:
    """Launch a kernel that reads so many matrices (M, N)."""
    width, has_rest, rows = whole_rows.tile_of(config, call.N)
    call.run(
        kernel,
        programs,
        whole_rows.options(config, call.N, matrices, call.device),
        ACTIVATION=ACTIVATIONS.index(call.activation),
        INTERLEAVED=call.layout == "interleaved",
        WIDTH=width,
        HAS_REST=has_rest,
        ROWS=rows,
        **values,
    )


# References


VALUES_AT_ONCE = 1 << 26
"""Elements (M, N) that a reference computes at a time. It takes up to 83 bytes for each, most of them in float64."""


def row_blocks(call: Call) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield rows, the end rows of the groups within them, gate and up as float32, and weights (rows, 1) or None."""
    count = max(1, VALUES_AT_ONCE // max(1, call.N))
    for first in range(0, call.M, count):
        rows = slice(first, min(first + count, call.M))
        ends = (call.offs - first).clamp(0, rows.stop - first)
        x = values_of(call.x[rows], ends, None if call.x_scales is None else call.x_scales[rows], call.bias)
        factors = None
        if call.weights is not None:
            factors = call.weights[rows, None].clone()
            factors[int(ends[-1]) :] = 0
        yield rows, ends, x, factors


def bounds(ends: torch.Tensor) -> list[tuple[int, int]]:
    """Return the first row of each group and the one past its last."""
    return list(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))


def values_of(
    x: torch.Tensor, offs: torch.Tensor, x_scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return gate and up as float32 that hold values of bfloat16, bias included; zeros in rows of no group."""
    values = x.float()
    if x_scales is not None:
        values = values * x_scales.view(-1, 1).reciprocal()
    if bias is not None:
        for group, (start, end) in enumerate(bounds(offs)):
            values[start:end] = (values[start:end] + bias[group].float()).bfloat16().float()
    values[int(offs[-1]) :] = 0
    return values


def split(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of gate and up."""
    if layout == "halves":
        gate, up = values.chunk(2, 1)
        return gate, up
    return values[:, 0::2], values[:, 1::2]


def scale_of_rows(values: torch.Tensor, float8_dtype: torch.dtype) -> torch.Tensor:
    """Return the scales (M, 1) of a matrix (M, columns)."""
    amax = values.abs().amax(1, keepdim=True) if values.shape[1] else values.new_zeros(len(values), 1)
    return reference_scale(amax, float8_dtype, power_of_two=True)


# Declarations


def wrong_rows(config: Config, shape: Shape, limits: DeviceLimits, matrices: int) -> str | None:
    """Return the hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    if config == DECLARED["default"]:
        return None
    width, _, rows = whole_rows.tile_of(config, shape["N"])
    least = min(AXES["TILE"])
    if least < config["TILE"] and rows == whole_rows.tile_of({**config, "TILE": least}, shape["N"])[2]:
        return f"same binary as TILE={least}: one row at a time"
    if config["num_stages"] > 1 and limits.arch.startswith("sm_"):
        count = whole_rows.shared_bytes(config, shape["N"], matrices)
        if reason := too_many_shared_bytes(count, f"of rows in {config['num_stages']} stages", limits):
            return reason
    return wrong_tile(config, width * rows, limits, least=8, too_few="too few loads under way", held="gate and up do")


def problems(row: Shape) -> Iterator[NamedInts]:
    """Yield the activation that a GEMM down reads: its K is N here. Which rows of a set are such GEMMs no row says."""
    N, _ = row["K"], row["N"]  # KeyError: a row without weights has no MLP
    yield NamedInts(M=row["M"], N=N, G=row["E"])


def check_x(x: torch.Tensor) -> None:
    """Raise ValueError unless x is row-major (M, 2N) in bfloat16 or FP8."""
    if x.dim() != 2 or not x.is_contiguous() or x.shape[1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {x.stride()}, wanted row-major (M, 2N)")
    if x.dtype != torch.bfloat16 and x.dtype not in FP8_DTYPES:
        raise ValueError(f"x is {x.dtype}, wanted torch.bfloat16 or FP8 codes")


def check_scales_and_bias(x: torch.Tensor, x_scales: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless codes, and they alone, have scales, and no bias, which they include."""
    is_codes = x.dtype in FP8_DTYPES
    if is_codes != (x_scales is not None):
        needed = "a scale for each row" if is_codes else "None"
        raise ValueError(f"x_scales is {'None' if is_codes else 'a tensor'}, wanted {needed} beside {x.dtype}")
    if is_codes and bias is not None:
        raise ValueError("bias is a tensor, wanted None: codes of x include it")


def random_inputs(problem: Problem, device: str) -> Mapping[str, Any]:
    """Return random x, as codes with scales or in bfloat16; with ``bias`` and ``weights`` if the shape has them."""
    M, N, G = (problem.shape[size] for size in "MNG")
    x = random_matrix(replace(problem, in_dtype="bfloat16"), M, 2 * N, device)
    dtype, x_scales = dtype_named(problem.in_dtype), None
    if dtype in FP8_DTYPES and x.is_meta:
        x, x_scales = x.to(dtype), x.new_empty(M, 1, dtype=torch.float32)
    elif dtype in FP8_DTYPES:
        x_scales = scale_of_rows(x.float(), dtype)
        x = reference_cast(x, x_scales, dtype)
    bias = random_matrix(replace(problem, in_dtype="bfloat16", seed=problem.seed + 3), G, 2 * N, device)
    factors = random_matrix(replace(problem, in_dtype="float32", seed=problem.seed + 4), M, 1, device)
    return {
        "x": x,
        "x_scales": x_scales,
        "bias": bias if problem.shape.get("bias") else None,
        "weights": factors.view(M) if problem.shape.get("weights") else None,
    }


X = declare.Argument("x", dims=("M", "2 * N"), check=check_x)

OPTIONS = (
    declare.tensor("x_scales", "M", optional=True),
    declare.tensor("bias", "2 * N * G", "bfloat16", optional=True),
    declare.tensor("weights", "M", optional=True),
    declare.choice("activation", ACTIVATIONS),
    declare.choice("layout", LAYOUTS),
)

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (8, 16, 32, 64),
    "TILE": (2048, 4096, 8192),
    "num_warps": (4, 8, 16, 32),
    # with two stages a program waits for what it has just asked for: on an H100 slower than with three everywhere
    "num_stages": (1, 3, 4),
}

DECLARED: dict[str, Any] = {
    "axes": AXES,
    "default": {"BLOCK_SIZE_M": 16, "TILE": 4096, "num_warps": 8, "num_stages": 1},
    "key": ("M_bucket", "N", "G", DTYPE_FLAG),
    "interpreted": {"M": 157, "N": 83, "G": 3},
    "layout_sizes": {"N": 272},
    "in_dtypes": ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
}
"""Fields that both kernels of gate and up have."""

EDGES = (
    edge("one row, huge values", "huge", routing="ragged", M=1, N=48, G=3),
    edge("a block and one more", routing="balanced", M=513, N=144, G=1),
    edge("rows of no group, NaN", "nan", routing="empty", M=277, N=48, G=4),
    edge("a prime, infinity", "infinite", routing="ragged", M=67, N=48, G=3),
    edge("empty groups, zeros", "zeros", routing="empty", M=37, N=48, G=3),
    edge("one column, tiny values", "tiny", routing="ragged", M=67, N=1, G=2),
    edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, N=129, G=2),
    edge("a tail of columns", routing="ragged", M=67, N=past_half("N", 16), G=2),
)
