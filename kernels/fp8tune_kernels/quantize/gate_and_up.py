"""A matrix (M, 2N) of gate and up: how kernels read and write tiles of both, its values, random ones, and checks.

layout "halves"       all columns of the gate, and then those of up
layout "interleaved"  gate and up in turn
x_scales              what the rows of codes were multiplied by: powers of two, as ``rowwise-2d`` makes them
bias                  (G, 2N), bfloat16, added to x of bfloat16 and rounded; or None
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..inputs import dtype_named, random_matrix
from ..runtime.checks import FP8_DTYPES, check_offsets
from ..spec import Problem
from .arithmetic import quantize, reference_cast, reference_scale
from .gated import ACTIVATIONS, LAYOUTS

__all__ = [
    "check_gate_and_up",
    "check_values",
    "load_gate_and_up",
    "options_of",
    "random_gate_and_up",
    "scale_of_rows",
    "split",
    "store_gate_and_up",
    "values_of",
]


@triton.jit
def load_gate_and_up(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    group: tl.tensor,
    N: tl.tensor,
    row: tl.tensor,
    in_rows: tl.tensor,
    lanes: tl.tensor,
    columns: tl.tensor,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rows ``row + lanes`` and some columns of gate and up as float32 that hold values of bfloat16; zeros outside.

    ``columns`` start at a multiple of their number. Bias included.
    """
    inside = in_rows[:, None] & (columns < N)[None, :]
    x_rows = x_ptr + row.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N)
    if INTERLEAVED:
        WIDTH: tl.constexpr = columns.shape[0]
        both = tl.min(columns, 0) * 2 + tl.arange(0, 2 * WIDTH)
        both_inside = in_rows[:, None] & (both < 2 * N)[None, :]
        x = tl.load(x_rows + both[None, :], mask=both_inside, other=0.0, eviction_policy="evict_first")
        gate, up = tl.split(x.to(tl.float32).reshape(lanes.shape[0], WIDTH, 2))
    else:
        gate = tl.load(x_rows + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        up = tl.load(x_rows + N + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    if x_scales_ptr is not None:
        scale = tl.load(x_scales_ptr + row + lanes, mask=in_rows, other=1.0)
        inverse = _inverse_of(scale)[:, None]
        gate, up = gate * inverse, up * inverse
    if bias_ptr is not None:
        of_gate, of_up = columns, N + columns
        if INTERLEAVED:
            of_gate, of_up = 2 * columns, 2 * columns + 1
        bias = bias_ptr + group.to(tl.int64) * (2 * N)
        is_read = (tl.max(in_rows.to(tl.int32), 0) > 0) & (columns < N)
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
    gate: tl.tensor,
    up: tl.tensor,
    scale: tl.tensor,
    FP8_MAX: tl.constexpr,
    N: tl.tensor,
    row: tl.tensor,
    in_rows: tl.tensor,
    lanes: tl.tensor,
    columns: tl.tensor,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Store codes of both, with a scale a row, where :func:`load_gate_and_up` found them."""
    q_rows = q_ptr + row.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N)
    gate = quantize(gate, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    up = quantize(up, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    if INTERLEAVED:
        WIDTH: tl.constexpr = columns.shape[0]
        both = tl.min(columns, 0) * 2 + tl.arange(0, 2 * WIDTH)
        codes = tl.join(gate, up).reshape(lanes.shape[0], 2 * WIDTH)
        tl.store(q_rows + both[None, :], codes, mask=in_rows[:, None] & (both < 2 * N)[None, :])
    else:
        inside = in_rows[:, None] & (columns < N)[None, :]
        tl.store(q_rows + columns[None, :], gate, mask=inside)
        tl.store(q_rows + N + columns[None, :], up, mask=inside)


def values_of(
    x: torch.Tensor, offs: torch.Tensor, x_scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Gate and up as float32 that hold values of bfloat16, bias included; zeros in rows of no group."""
    values = x.float()
    if x_scales is not None:
        values = values * x_scales.view(-1, 1).reciprocal()
    start = 0
    for group, end in enumerate(offs.tolist()):
        if bias is not None:
            values[start:end] = (values[start:end] + bias[group].float()).bfloat16().float()
        start = end
    values[start:] = 0
    return values


def split(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of gate and up."""
    if layout == "halves":
        gate, up = values.chunk(2, 1)
        return gate, up
    return values[:, 0::2], values[:, 1::2]


def scale_of_rows(values: torch.Tensor, float8_dtype: torch.dtype) -> torch.Tensor:
    """(M, columns) -> (M, 1)."""
    amax = values.abs().amax(1, keepdim=True) if values.shape[1] else values.new_zeros(len(values), 1)
    return reference_scale(amax, float8_dtype, power_of_two=True)


def options_of(problem: Problem) -> tuple[str, str]:
    """The activation and the layout of a problem."""
    return ACTIVATIONS[problem.shape.get("activation", 0)], LAYOUTS[problem.shape.get("layout", 0)]


def random_gate_and_up(problem: Problem, M: int, N: int, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix (M, 2N) of normal values, in bfloat16 or as codes with their scales (M, 1)."""
    x = random_matrix(replace(problem, in_dtype="bfloat16"), M, 2 * N, device)
    dtype = dtype_named(problem.in_dtype)
    if dtype not in FP8_DTYPES:
        return x, None
    if torch.device(device).type == "meta":
        return x.to(dtype), x.new_empty(M, 1, dtype=torch.float32)
    scales = scale_of_rows(x.float(), dtype)
    return reference_cast(x, scales, dtype), scales


def check_gate_and_up(
    x: torch.Tensor,
    offs: torch.Tensor,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    activation: str,
    layout: str,
) -> None:
    """Raise ValueError for what kernels do not read."""
    for name, given, known in (("activation", activation, ACTIVATIONS), ("layout", layout, LAYOUTS)):
        if given not in known:
            raise ValueError(f"{name} is {given!r}, wanted {' or '.join(map(repr, known))}")
    if x.dim() != 2 or not x.is_contiguous() or x.shape[1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {x.stride()}, wanted row-major (M, 2N)")
    is_codes = x.dtype in FP8_DTYPES
    if not is_codes and x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}, wanted torch.bfloat16 or FP8 codes")
    if is_codes != (x_scales is not None):
        wanted = "a scale for each row" if is_codes else "None"
        raise ValueError(f"x_scales is {'None' if is_codes else 'a tensor'}, wanted {wanted} beside {x.dtype}")
    if is_codes and bias is not None:
        raise ValueError("bias is a tensor, wanted None: codes of x include it")
    check_offsets(offs, x.device)
    G = offs.shape[0]
    check_values("x_scales", x_scales, torch.float32, x.shape[0], x)
    check_values("bias", bias, torch.bfloat16, G * x.shape[1], x)
    check_values("weights", weights, torch.float32, x.shape[0], x)


def check_values(name: str, given: torch.Tensor | None, dtype: torch.dtype, count: int, x: torch.Tensor) -> None:
    """Raise ValueError unless ``given`` is None or so many contiguous values of a dtype, on the device of x."""
    if given is None:
        return
    if given.dtype != dtype or given.numel() != count or not given.is_contiguous() or given.device != x.device:
        has = f"{given.dtype} of shape {tuple(given.shape)}, strides {given.stride()} on {given.device}"
        raise ValueError(f"{name} is {has}, wanted {count} contiguous values of {dtype} on {x.device}")
