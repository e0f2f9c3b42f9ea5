"""The steps of a layer in FP8, an operator each, with only the tensors that the step reads.

A tensor that no later step reads can therefore be freed between two steps, in eager mode and in a compiled graph.
Inside a step, kernels are launched one after the other, without a dispatcher. On a CPU, steps run the references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gemm import passes
from ..quantize import (
    colwise_3d,
    rowwise_2d,
    swiglu_rowwise,
    transpose_3d_atomic,
    transposed_codes,
    transposed_codes_3d,
)
from ..quantize.row_shifts import shifts_and_scales
from ..runtime.checks import fp8_dtype_for
from ..runtime.ops import define, on_its_device, run
from ..runtime.replay import replayed
from ..spec import bucket
from . import cast_transpose_3d, expert_sort, gather_sum, gathered_transpose, shifted_transpose_3d
from .gathered_rows import run_gathered_rows

__all__ = [
    "activate_again",
    "add_down_weight_gradient",
    "add_gate_up_weight_gradient",
    "down_gradient",
    "down_weight_gradient",
    "forward",
    "gate_up_weight_gradient",
    "input_gradient",
    "quantized",
    "quantized_both_ways",
    "transposed",
    "transposed_to_one_scale",
]

Quantized = tuple[Tensor, Tensor]
"""FP8 values and scales."""


# Kernels


def _quantized_rows(x: Tensor, dtype: torch.dtype) -> Quantized:
    q, scales = run(rowwise_2d.SPEC, (bucket(x.shape[0]), x.shape[1]), (x, dtype, True))
    return q, scales


def quantized(w: Tensor, dtype: torch.dtype) -> Quantized:
    """Return FP8 values (E, columns, rows), a view, and a scale per row of weights (E, rows, columns).

    Weights lie row-major, or are the transposed view of such: the values lie in memory in the same way.
    """
    if w.is_contiguous():
        view = w.transpose(1, 2)
        q, scales = run(colwise_3d.SPEC, tuple(view.shape), (view, dtype, True))
    else:
        q, scales = run(transpose_3d_atomic.SPEC, tuple(w.shape), (w, dtype, True))
    return q, scales


def quantized_both_ways(w: Tensor, one_scale: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return what :func:`quantized` does, then the transposed FP8 values and their scales, if they have any.

    Row-major weights are read once.
    """
    if w.is_contiguous():
        inputs = w, one_scale, dtype
        return run(cast_transpose_3d.SPEC, cast_transpose_3d.key(*inputs), inputs)
    q, scales = quantized(w, dtype)
    if one_scale:
        return q, scales, *transposed_to_one_scale(q, scales)
    return q, scales, transposed(q), scales.new_empty(0)


def transposed(q: Tensor) -> Tensor:
    """Return the FP8 values of :func:`quantized`, transposed in memory; their scales stay those of rows."""
    (result,) = run(transposed_codes_3d.SPEC, tuple(q.shape), (q,))
    return result


def transposed_to_one_scale(q: Tensor, scales: Tensor) -> Quantized:
    """Return the FP8 values of :func:`quantized`, transposed in memory, with one scale per expert."""
    result, of_columns = run(shifted_transpose_3d.SPEC, tuple(q.shape), (q, scales))
    return result, of_columns


def _activated(
    y: Tensor,
    offs: Tensor,
    scales_y: Tensor | None,
    bias: Tensor | None,
    row_weights: Tensor,
    activation: str,
    layout: str,
    keeps_y: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return FP8 values and scales of the activation, and of gate and up."""
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
    inputs = y, offs, scales_y, bias, row_weights, activation, layout, keeps_y, dtype
    return swiglu_rowwise.SPEC(*inputs)


def sum_of_rows(
    rows: Tensor,
    row_of: Tensor,
    bias: Tensor | None = None,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the sum of the rows of each token, with the bias of each of its experts."""
    if row_of.dim() == 1:  # each row is a token
        return rows
    inputs: tuple[Any, ...] = rows, row_of, None, None, None
    if bias is not None and weights is not None:
        inputs = rows, row_of, bias.to(torch.bfloat16).contiguous(), ids, weights.float()
    (out,) = run(gather_sum.SPEC, (bucket(rows.shape[0]), rows.shape[1]), inputs)
    return out


def sorted_by_expert(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, ...]:
    """Return ``offs``, ``row_of``, ``token_of_row`` and ``row_weights``: see :mod:`.expert_sort`.

    Ids of one dim are the end rows of experts whose rows lie in order already: each row is a token.
    """
    if ids.dim() == 1:
        rows = torch.arange(weights.shape[0], dtype=torch.int32, device=ids.device)
        return ids.clone(), rows, rows.clone(), weights.to(torch.float32, copy=True)  # operators return no argument
    return run(expert_sort.SPEC, expert_sort.key(ids, weights, experts), (ids, weights, experts))


def order_outputs(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, ...]:
    """Return uninitialized outputs of :func:`sorted_by_expert`."""
    if ids.dim() == 1:
        rows = torch.empty_like(weights, dtype=torch.int32)
        return torch.empty_like(ids), rows, torch.empty_like(rows), torch.empty_like(weights, dtype=torch.float32)
    return expert_sort.outputs(ids, weights, experts)


def _transposed_rows(q: Tensor, offs: Tensor, shifts: Tensor | None) -> Tensor:
    (result,) = run(transposed_codes.SPEC, (bucket(q.shape[0]), q.shape[1], offs.shape[0]), (q, offs, shifts))
    return result


def _gathered_and_transposed(q: Tensor, offs: Tensor, token_of_row: Tensor, shifts: Tensor | None) -> Tensor:
    inputs = q, offs, token_of_row, shifts
    (result,) = run(gathered_transpose.SPEC, gathered_transpose.key(*inputs), inputs)
    return result


def _contracted(
    grad: Quantized,
    rows: Quantized,
    offs: Tensor,
    M: int,
    is_transposed: bool,
    buffer: Tensor | None,
) -> Tensor:
    """Return the product over the rows of each expert of two transposed matrices, (E, N, K), or (E, K, N).

    With a buffer, which lies as the product does: the buffer, with the product added.
    """
    if is_transposed:
        grad, rows = rows, grad
    return passes.contract(grad, rows, offs, M, buffer)


# Steps


def _forward(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    q_13: Tensor | None,
    scales_13: Tensor | None,
    q_2: Tensor | None,
    scales_2: Tensor | None,
    activation: str,
    layout: str,
    keeps_y: bool,
    transposes_13: bool,
    transposes_2: bool,
    float8_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Return the output; the order of rows; FP8 values and scales of x, the activation, gate and up, new weights.

    Of new weights that it transposes it returns the transposed values, and scales of both.
    """
    dtype, E = fp8_dtype_for(x.device, float8_dtype), w13.shape[0]
    offs, row_of, token_of_row, row_weights = sorted_by_expert(ids, weights, E)
    new: list[Tensor] = []
    q_x, scales_x = _quantized_rows(x, dtype)
    if q_13 is None or scales_13 is None:
        q_13, scales_13, *new_13 = _new_weights(w13, transposes_13, False, dtype)
        new += new_13
    y = run_gathered_rows(q_x, q_13.mT, offs, token_of_row, scales_x, scales_13)
    del q_13
    q_h, scales_h, q_y, scales_y = _activated(y, offs, None, b13, row_weights, activation, layout, keeps_y, dtype)
    del y
    if q_2 is None or scales_2 is None:
        q_2, scales_2, *new_2 = _new_weights(w2, transposes_2, True, dtype)
        new += new_2
    rows = passes.multiply((q_h, scales_h), (q_2, scales_2), offs)
    out = sum_of_rows(rows, row_of, b2, ids, weights)
    return [out, offs, row_of, token_of_row, row_weights, q_x, scales_x, q_h, scales_h, q_y, scales_y, *new]


def _new_weights(w: Tensor, transposes: bool, one_scale: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return FP8 values and scales of weights, and then what the layer keeps of them."""
    if not transposes:
        q, scales = quantized(w, dtype)
        return q, scales, q, scales
    q, scales, *both = quantized_both_ways(w, one_scale, dtype)
    return q, scales, both[0], scales, *(both[1:] if one_scale else ())


def _fake_new_weights(w: Tensor, transposes: bool, one_scale: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, scales = colwise_3d.SPEC.outputs(w.transpose(1, 2), dtype, True)
    if not transposes:
        return q, scales
    transposed, of_columns = shifted_transpose_3d.outputs(q, scales)
    return transposed, scales, *((of_columns,) if one_scale else ())


def _fake_forward(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> list[Tensor]:
    _, _, q_13, _, q_2, _, activation, layout, keeps_y, transposes_13, transposes_2, float8_dtype = rest
    dtype, order = fp8_dtype_for(x.device, float8_dtype), order_outputs(ids, weights, w13.shape[0])
    y = x.new_empty(order[2].shape[0], w13.shape[1], dtype=torch.bfloat16)
    new = () if q_13 is not None else _fake_new_weights(w13, transposes_13, False, dtype)
    new += () if q_2 is not None else _fake_new_weights(w2, transposes_2, True, dtype)
    return [
        x.new_empty(x.shape, dtype=torch.bfloat16),
        *order,
        *rowwise_2d.SPEC.outputs(x, dtype, True),
        *swiglu_rowwise.SPEC.outputs(y, order[0], None, None, None, activation, layout, keeps_y, dtype),
        *new,
    ]


def _activate_again(
    offs: Tensor,
    token_of_row: Tensor,
    row_weights: Tensor,
    q_y: Tensor | None,
    scales_y: Tensor | None,
    q_x: Tensor | None,
    scales_x: Tensor,
    q_13: Tensor | None,
    scales_13: Tensor,
    w13: Tensor | None,
    b13: Tensor | None,
    activation: str,
    layout: str,
    float8_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Return FP8 values and scales of the activation; without those of gate and up, also gate and up in bfloat16."""
    dtype = fp8_dtype_for(offs.device, float8_dtype)
    if q_y is not None:
        return list(_activated(q_y, offs, scales_y, None, row_weights, activation, layout, False, dtype)[:2])
    assert q_x is not None
    if q_13 is None:
        assert w13 is not None
        q_13, _ = quantized(w13, dtype)
    y = run_gathered_rows(q_x, q_13.mT, offs, token_of_row, scales_x, scales_13)
    q_h, scales_h, _, _ = _activated(y, offs, None, b13, row_weights, activation, layout, False, dtype)
    return [q_h, scales_h, y]


def _fake_activate_again(
    offs: Tensor, token_of_row: Tensor, row_weights: Tensor, q_y: Tensor | None, *rest: Any
) -> list[Tensor]:
    scales_13, dtype = rest[4], fp8_dtype_for(offs.device, rest[-1])
    shape = token_of_row.shape[0], scales_13.numel() // offs.shape[0]
    y = row_weights.new_empty(shape, dtype=torch.bfloat16)
    q_h, scales_h = swiglu_rowwise.SPEC.outputs(y, offs, None, None, None, "", "", False, dtype)[:2]
    return [q_h, scales_h] if q_y is not None else [q_h, scales_h, y]


def _down_gradient(
    grad: Tensor,
    offs: Tensor,
    token_of_row: Tensor,
    q_2: Tensor | None,
    scales_2: Tensor,
    transposed_2: Tensor | None,
    scales_transposed_2: Tensor | None,
    w2: Tensor | None,
    wants_h: bool,
    float8_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Return FP8 values and scales of the output's gradient, by token, and the gradient of the activation, by row."""
    dtype = fp8_dtype_for(grad.device, float8_dtype)
    q, scales = _quantized_rows(grad, dtype)
    if not wants_h:
        return [q, scales]
    if transposed_2 is None or scales_transposed_2 is None:
        if q_2 is None:
            assert w2 is not None
            q_2, scales_2 = quantized(w2, dtype)
        transposed_2, scales_transposed_2 = transposed_to_one_scale(q_2, scales_2)
        del q_2
    dh = run_gathered_rows(q, transposed_2.mT, offs, token_of_row, scales, scales_transposed_2)
    return [q, scales, dh]


def _fake_down_gradient(grad: Tensor, offs: Tensor, token_of_row: Tensor, *rest: Any) -> list[Tensor]:
    q_2, _, transposed_2, _, w2, wants_h, float8_dtype = rest
    result = [*rowwise_2d.SPEC.outputs(grad, fp8_dtype_for(grad.device, float8_dtype), True)]
    if wants_h:
        N = transposed_2.shape[2] if transposed_2 is not None else w2.shape[2] if q_2 is None else q_2.shape[1]
        result.append(grad.new_empty(token_of_row.shape[0], N, dtype=torch.bfloat16))
    return result


def _down_weight_gradient(
    q: Tensor,
    scales: Tensor,
    q_h: Tensor,
    scales_h: Tensor,
    offs: Tensor,
    token_of_row: Tensor,
    is_transposed: bool,
    buffer: Tensor | None = None,
) -> Tensor:
    """Return the gradient of w2, (E, K, N) or (E, N, K), from the output's by token and the activation by row."""
    sizes = q.shape[1], q_h.shape[1]
    shifts, of_columns, ones = shifts_and_scales(scales_h, scales, offs, None, *sizes, token_of_row)
    shifted = _gathered_and_transposed(q, offs, token_of_row, shifts)
    activations = _transposed_rows(q_h, offs, None)
    M = token_of_row.shape[0]
    return _contracted((shifted, of_columns), (activations, ones), offs, M, is_transposed, buffer)


def _fake_down_weight_gradient(
    q: Tensor, scales: Tensor, q_h: Tensor, scales_h: Tensor, offs: Tensor, _: Tensor, is_transposed: bool
) -> Tensor:
    return _empty_gradient(q, q_h, offs, is_transposed)


def _empty_gradient(grad: Tensor, rows: Tensor, offs: Tensor, is_transposed: bool) -> Tensor:
    N, K = grad.shape[1], rows.shape[1]
    return grad.new_empty(offs.shape[0], *((K, N) if is_transposed else (N, K)), dtype=torch.bfloat16)


def _input_gradient(
    q: Tensor,
    scales: Tensor,
    offs: Tensor,
    row_of: Tensor,
    q_13: Tensor | None,
    transposed_13: Tensor | None,
    w13: Tensor | None,
) -> Tensor:
    """Return the gradient of x, (T, K), from that of gate and up, which is cast over the scales of w13."""
    if transposed_13 is None:
        if q_13 is None:
            assert w13 is not None
            q_13, _ = quantized(w13, q.dtype)
        transposed_13 = transposed(q_13)
        del q_13
    E, _, K = transposed_13.shape
    rows = passes.multiply((q, scales), (transposed_13, scales.new_ones(E, 1, K)), offs)
    return sum_of_rows(rows, row_of)


def _fake_input_gradient(q: Tensor, scales: Tensor, offs: Tensor, row_of: Tensor, *rest: Any) -> Tensor:
    q_13, transposed_13, w13 = rest
    K = transposed_13.shape[2] if transposed_13 is not None else w13.shape[2] if q_13 is None else q_13.shape[1]
    return q.new_empty(row_of.shape[0], K, dtype=torch.bfloat16)


def _gate_up_weight_gradient(
    q: Tensor,
    scales: Tensor,
    scales_13: Tensor,
    q_x: Tensor,
    scales_x: Tensor,
    offs: Tensor,
    token_of_row: Tensor,
    is_transposed: bool,
    buffer: Tensor | None = None,
) -> Tensor:
    """Return the gradient of w13, (E, 2N, K) or (E, K, 2N), from that of gate and up by row and x by token."""
    sizes = q.shape[1], q_x.shape[1]
    shifts, of_columns, ones = shifts_and_scales(scales, scales_x, offs, scales_13, *sizes, token_of_row)
    shifted = _transposed_rows(q, offs, shifts)
    tokens = _gathered_and_transposed(q_x, offs, token_of_row, None)
    M = token_of_row.shape[0]
    return _contracted((shifted, of_columns), (tokens, ones), offs, M, is_transposed, buffer)


def _fake_gate_up_weight_gradient(
    q: Tensor,
    scales: Tensor,
    scales_13: Tensor,
    q_x: Tensor,
    scales_x: Tensor,
    offs: Tensor,
    _: Tensor,
    is_transposed: bool,
) -> Tensor:
    return _empty_gradient(q, q_x, offs, is_transposed)


# Operators


def _in_place(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a step that changes its last argument: no operator, as it has no part in a graph."""
    on_gpu = on_its_device(replayed(run))

    def call(*arguments: Any) -> Tensor:
        with torch.no_grad():
            result: Tensor = (on_gpu if arguments[0].is_cuda else run)(*arguments)
        return result

    return call


def step(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define the operator of a step."""

    def on_cpu(*arguments: Any) -> Any:
        with torch.no_grad():  # autograd would follow the references, and fails at their views
            return run(*arguments)

    return define(schema, run, on_cpu, fake, makes_codes=True, replays=True)


forward: Callable[..., list[Tensor]] = step(
    "moe_forward(Tensor x, Tensor w13, Tensor w2, Tensor ids, Tensor weights, Tensor? b13, Tensor? b2, Tensor? q_13, "
    "Tensor? scales_13, Tensor? q_2, Tensor? scales_2, str activation, str layout, bool keeps_y, bool transposes_13, "
    "bool transposes_2, ScalarType? float8_dtype) -> Tensor[]",
    _forward,
    _fake_forward,
)
activate_again: Callable[..., list[Tensor]] = step(
    "moe_activate_again(Tensor offs, Tensor token_of_row, Tensor row_weights, Tensor? q_y, Tensor? scales_y, "
    "Tensor? q_x, Tensor scales_x, Tensor? q_13, Tensor scales_13, Tensor? w13, Tensor? b13, str activation, "
    "str layout, ScalarType? float8_dtype) -> Tensor[]",
    _activate_again,
    _fake_activate_again,
)
down_gradient: Callable[..., list[Tensor]] = step(
    "moe_down_gradient(Tensor grad, Tensor offs, Tensor token_of_row, Tensor? q_2, Tensor scales_2, "
    "Tensor? transposed_2, Tensor? scales_transposed_2, Tensor? w2, bool wants_h, ScalarType? float8_dtype) "
    "-> Tensor[]",
    _down_gradient,
    _fake_down_gradient,
)
down_weight_gradient: Callable[..., Tensor] = step(
    "moe_down_weight_gradient(Tensor q, Tensor scales, Tensor q_h, Tensor scales_h, Tensor offs, Tensor token_of_row, "
    "bool is_transposed) -> Tensor",
    _down_weight_gradient,
    _fake_down_weight_gradient,
)
input_gradient: Callable[..., Tensor] = step(
    "moe_input_gradient(Tensor q, Tensor scales, Tensor offs, Tensor row_of, Tensor? q_13, Tensor? transposed_13, "
    "Tensor? w13) -> Tensor",
    _input_gradient,
    _fake_input_gradient,
)
gate_up_weight_gradient: Callable[..., Tensor] = step(
    "moe_gate_up_weight_gradient(Tensor q, Tensor scales, Tensor scales_13, Tensor q_x, Tensor scales_x, Tensor offs, "
    "Tensor token_of_row, bool is_transposed) -> Tensor",
    _gate_up_weight_gradient,
    _fake_gate_up_weight_gradient,
)
add_down_weight_gradient = _in_place(_down_weight_gradient)
add_gate_up_weight_gradient = _in_place(_gate_up_weight_gradient)
