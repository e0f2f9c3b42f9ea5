"""The steps of a layer in bfloat16, an operator each. Rows are copied for torch's grouped GEMM; nothing is cast.

The activation is made again for its gradient:

    h[r, n]       = bfloat16( gated(gate[r, n], up[r, n]) * weights[r] )    see :mod:`fp8tune_kernels.quantize.gated`
    d_gate, d_up  = bfloat16( gated_gradient(gate, up, dh * weights) )
    d_weights[r]  = sum over n of dh[r, n] * gated(gate[r, n], up[r, n])

    y        (M, 2N), row-major, bfloat16: gate and up, in ``halves`` or ``interleaved``
    dh       (M, N), row-major, bfloat16
    weights  (M,), float32
    offs     (G,), int32: rows from ``offs[-1]`` on are zeros
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import interpreter
from ..gemm import passes
from ..quantize.gate_and_up import Rows, Source, load_gate_and_up, split
from ..quantize.gated import ACTIVATIONS, gated, gated_gradient, reference_gated, reference_gated_gradient
from ..runtime.launching import launch_kernel
from ..runtime.ops import is_traced, step
from .fp8_steps import Given, Maybe, Order, sorted_by_expert, sum_of_rows

CONFIG = {"ROWS": 4, "WIDTH": 512, "num_warps": 4}


@triton.jit(do_not_specialize=["M", "G"])  # both change every step and must not cause a recompilation
def activate_kernel(
    y_ptr: tl.tensor,  # (M, 2N), row-major
    weights_ptr: tl.tensor,  # (M,)
    offs_ptr: tl.tensor,  # (G,)
    h_ptr: tl.tensor,  # (M, N), row-major
    M: tl.tensor,
    N: tl.tensor,
    G: tl.tensor,
    ACTIVATION: tl.constexpr,  # a place in ACTIVATIONS
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute ROWS rows of h."""
    row, lanes = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    in_rows, is_read = row + lanes < M, row + lanes < tl.load(offs_ptr + G - 1)
    weights = tl.load(weights_ptr + row + lanes, mask=is_read, other=0.0)[:, None]
    source, rows = Source(y_ptr, None, None, N, INTERLEAVED), Rows(0, row, lanes, in_rows, is_read, None)
    for first in range(0, N, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        gate, up = load_gate_and_up(source, rows, columns)
        h = gated(gate, up, ACTIVATION) * weights
        h = tl.where(is_read[:, None], h, 0.0).to(tl.bfloat16)
        at = h_ptr + row.to(tl.int64) * N + lanes[:, None] * N + columns[None, :]
        tl.store(at, h, mask=in_rows[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["M", "G"])
def activation_gradient_kernel(
    y_ptr: tl.tensor,  # (M, 2N), row-major
    dh_ptr: tl.tensor,  # (M, N), row-major
    weights_ptr: tl.tensor,  # (M,)
    offs_ptr: tl.tensor,  # (G,)
    dy_ptr: tl.tensor,  # (M, 2N), row-major
    h_ptr: tl.tensor,  # (M, N), row-major
    d_weights_ptr: tl.tensor,  # (M,)
    M: tl.tensor,
    N: tl.tensor,
    G: tl.tensor,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute ROWS rows of all three."""
    row, lanes = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    in_rows, is_read = row + lanes < M, row + lanes < tl.load(offs_ptr + G - 1)
    weights = tl.load(weights_ptr + row + lanes, mask=is_read, other=0.0)[:, None]
    source, rows = Source(y_ptr, None, None, N, INTERLEAVED), Rows(0, row, lanes, in_rows, is_read, None)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, N, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        gate, up = load_gate_and_up(source, rows, columns)
        of_h = row.to(tl.int64) * N + lanes[:, None] * N + columns[None, :]
        inside = in_rows[:, None] & (columns < N)[None, :]
        dh = tl.load(dh_ptr + of_h, mask=inside & is_read[:, None], other=0.0).to(tl.float32)
        d_gate, d_up, h = gated_gradient(gate, up, dh * weights, ACTIVATION)
        total += tl.sum(dh * h, 1)
        tl.store(h_ptr + of_h, tl.where(is_read[:, None], h * weights, 0.0).to(tl.bfloat16), mask=inside)
        dy = dy_ptr + row.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N)
        d_gate, d_up = d_gate.to(tl.bfloat16), d_up.to(tl.bfloat16)
        if INTERLEAVED:
            both = 2 * first + tl.arange(0, 2 * WIDTH)
            both_inside = in_rows[:, None] & (both < 2 * N)[None, :]
            tl.store(dy + both[None, :], tl.interleave(d_gate, d_up), mask=both_inside)
        else:
            tl.store(dy + columns[None, :], d_gate, mask=inside)
            tl.store(dy + N + columns[None, :], d_up, mask=inside)
    tl.store(d_weights_ptr + row + lanes, total, mask=in_rows)


def activate(y: Tensor, weights: Tensor, offs: Tensor, activation: str, layout: str) -> Tensor:
    """Return ``h``, (M, N), bfloat16; without a dispatcher, for operators that launch several kernels."""
    M, N, number = y.shape[0], y.shape[1] // 2, ACTIVATIONS.index(activation)
    if y.is_cpu and not interpreter.INTERPRETED and not is_traced(y):
        h = reference_gated(*split(y, layout), number) * weights[:, None]
        return _cleared(h.to(torch.bfloat16), offs)
    h = y.new_empty(M, N)
    if not is_traced(y) and M:
        constants, programs = (number, layout == "interleaved"), -(-M // CONFIG["ROWS"])
        launch_kernel(activate_kernel, programs, (y, weights, offs, h), (M, N, len(offs)), constants, CONFIG)
    return h


def activation_gradient(
    y: Tensor, dh: Tensor, weights: Tensor, offs: Tensor, activation: str, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(dy, h, d_weights)``: (M, 2N) and (M, N), bfloat16, and (M,), float32; without a dispatcher."""
    (M, N), number, dy = dh.shape, ACTIVATIONS.index(activation), torch.empty_like(y)
    if y.is_cpu and not interpreter.INTERPRETED and not is_traced(y):
        wide = _cleared(dh.float(), offs)
        d_gate, d_up, h = reference_gated_gradient(*split(y, layout), wide * weights[:, None], number)
        for half, of_it in zip(split(dy, layout), (d_gate, d_up), strict=True):
            half.copy_(of_it)
        weighted = _cleared((h * weights[:, None]).to(torch.bfloat16), offs)
        return _cleared(dy, offs), weighted, _cleared((wide * h).sum(1), offs)
    h, d_weights = torch.empty_like(dh), torch.empty_like(weights)
    if not is_traced(y) and M:
        tensors, constants = (y, dh, weights, offs, dy, h, d_weights), (number, layout == "interleaved")
        programs = -(-M // CONFIG["ROWS"])
        launch_kernel(activation_gradient_kernel, programs, tensors, (M, N, len(offs)), constants, CONFIG)
    return dy, h, d_weights


def _cleared(rows: Tensor, offs: Tensor) -> Tensor:
    """Rows with zeros from ``offs[-1]`` on, also where they were NaN."""
    outside = torch.arange(len(rows), device=rows.device) >= offs[-1]
    return rows.masked_fill(outside.view(-1, *[1] * (rows.dim() - 1)), 0)


# Steps


def _gate_up(x: Tensor, w13: Tensor, b13: Maybe, offs: Tensor, token_of_row: Tensor) -> Tensor:
    """Return gate and up, (M, 2N)."""
    y = passes.multiply_bf16(x.index_select(0, token_of_row), w13.mT, offs)
    return y if b13 is None else passes.add_bias(y, b13, offs)


def _forward(
    x: Tensor, w13: Tensor, w2: Tensor, choice: Sequence[Tensor], biases: Given, gate: Sequence[str]
) -> list[Tensor]:
    """Return the output; the order of rows; gate and up. ``choice``: ids and weights."""
    (ids, weights), (b13, b2) = choice, biases
    order = sorted_by_expert(ids, weights, w13.shape[0])
    y = _gate_up(x, w13, b13, order.offs, order.token_of_row)
    h = activate(y, order.row_weights, order.offs, *gate)
    rows = passes.multiply_bf16(h, w2.mT, order.offs)
    del h
    return [sum_of_rows(rows, order.row_of, b2, ids, weights), *order, y]


def _activation_gradients(
    grad: Tensor, y: Tensor, w2: Tensor, order_: Sequence[Tensor], gate: Sequence[str], wants_2: bool
) -> list[Tensor]:
    """Return the gradients of gate and up, of the rows' weights and, if wanted, of w2."""
    order = Order(*order_)
    grad_rows = grad.index_select(0, order.token_of_row)
    dh = passes.multiply_bf16(grad_rows, w2, order.offs)
    dy, h, d_weights = activation_gradient(y, dh, order.row_weights, order.offs, *gate)
    del dh
    return [dy, d_weights, *([passes.contract_bf16(grad_rows, h, order.offs)] if wants_2 else [])]


def _token_gradients(dy: Tensor, x: Maybe, w13: Maybe, order_: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of x, if w13 is given, and that of w13, if x is given."""
    order, result = Order(*order_), list[Tensor]()
    if w13 is not None:
        result.append(sum_of_rows(passes.multiply_bf16(dy, w13, order.offs), order.row_of))
    if x is not None:
        result.append(passes.contract_bf16(dy, x.index_select(0, order.token_of_row), order.offs))
    return result


gate_up = step("moe_bf16_gate_up", _gate_up)
forward = step("moe_bf16_forward", _forward)
activation_gradients = step("moe_bf16_activation_gradients", _activation_gradients)
token_gradients = step("moe_bf16_token_gradients", _token_gradients)
