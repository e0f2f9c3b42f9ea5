"""Operators of ``fp8_grouped_mm``: one per pass, and one for all gradients that are needed, which is its backward.

An operator costs 4 to 11 us of host time beside the kernels it launches (H100, torch 2.11.0). Weights lie as (E, N, K)
or, with ``is_row_major``, as (E, K, N): no copy is made of either. FP8 values and scales, where given, are those of the
casts in :mod:`.passes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..quantize import rowwise_colwise
from ..runtime.checks import check_ends, fp8_dtype_for
from ..runtime.ops import define, run
from ..spec import bucket
from . import passes
from .grouped_contraction import ALIGNMENT

__all__ = ["forward", "gradients"]

_NONE: tuple[Tensor | None, ...] = (None, None, None, None)


def _run_forward(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    is_fp8: bool,
    q_A: Tensor | None,
    scales_A: Tensor | None,
    q_B: Tensor | None,
    scales_B: Tensor | None,
) -> Tensor:
    """Return the product, (M, N)."""
    if not is_fp8:
        return passes.multiply_bf16(A, B_t, offs)
    float8_dtype = fp8_dtype_for(A.device, float8_dtype)
    rows = _pair(q_A, scales_A) or passes.quantize_rows(A, float8_dtype)
    weights = _pair(q_B, scales_B) or passes.quantize_stored(B_t.mT, float8_dtype)
    return passes.multiply(rows, weights, offs)


def _run_input_gradient(
    grad: Tensor,
    B_t: Tensor | None,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    is_fp8: bool,
    q_grad: Tensor | None,
    scales_grad: Tensor | None,
    q_B: Tensor | None,
    scales_B: Tensor | None,
) -> Tensor:
    """Return the gradient of A, (M, K)."""
    if not is_fp8:
        assert B_t is not None
        return passes.multiply_bf16(grad, B_t.mT, offs)
    float8_dtype = fp8_dtype_for(grad.device, float8_dtype)
    rows = _pair(q_grad, scales_grad) or passes.quantize_rows(grad, float8_dtype)
    weights = _pair(q_B, scales_B)
    if weights is None:
        assert B_t is not None
        weights = passes.quantize_stored(B_t, float8_dtype)
    return passes.multiply(rows, weights, offs)


def _run_weight_gradient(
    grad: Tensor,
    A: Tensor | None,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    is_fp8: bool,
    q_grad: Tensor | None,
    scales_grad: Tensor | None,
    q_A: Tensor | None,
    scales_A: Tensor | None,
    is_row_major: bool = False,
) -> Tensor:
    """Return the gradient of the weights as they lie, (E, N, K) or (E, K, N)."""
    if not is_fp8:
        assert A is not None
        return passes.contract_bf16(*((A, grad) if is_row_major else (grad, A)), offs)
    float8_dtype = fp8_dtype_for(grad.device, float8_dtype)
    of_grad, of_A = _pair(q_grad, scales_grad), _pair(q_A, scales_A)
    if of_grad is None and of_A is None and A is not None and A.dtype == grad.dtype:
        of_grad, of_A = passes.quantize_both_columns(grad, A, offs, float8_dtype)
    if of_grad is None:
        of_grad = passes.quantize_columns(grad, offs, float8_dtype)
    if of_A is None:
        assert A is not None
        of_A = passes.quantize_columns(A, offs, float8_dtype)  # float32 is quantized from float32
    return passes.contract(*((of_A, of_grad) if is_row_major else (of_grad, of_A)), offs, grad.shape[0])


def _run_gradients(
    grad: Tensor,
    A: Tensor | None,
    q_A: Tensor | None,
    scales_A: Tensor | None,
    B_t: Tensor | None,
    q_B: Tensor | None,
    scales_B: Tensor | None,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    is_fp8: bool,
    wants_A: bool,
    wants_B: bool,
    is_row_major: bool,
) -> list[Tensor]:
    """Return the gradients that are needed: of A, then of the weights.

    Where FP8 values of A are given, one read casts grad for both.
    """
    options = offs, float8_dtype, is_fp8
    q, scales, q_columns, scales_columns = _NONE
    if q_A is not None and wants_A and wants_B:
        key = bucket(grad.shape[0]), grad.shape[1], offs.shape[0]
        inputs = grad, offs, fp8_dtype_for(grad.device, float8_dtype), True, ALIGNMENT
        q, scales, q_columns, scales_columns = run(rowwise_colwise.SPEC, key, inputs)
    result = []
    if wants_A:
        result.append(_run_input_gradient(grad, B_t, *options, q, scales, q_B, scales_B))
        del q  # or the other gradient has it beside its own
    if wants_B:
        quantized = q_columns, scales_columns, q_A, scales_A
        result.append(_run_weight_gradient(grad, A, *options, *quantized, is_row_major))
    return result


def _pair(q: Tensor | None, scales: Tensor | None) -> passes.Quantized | None:
    return None if q is None or scales is None else (q, scales)


def _columns_of_input_gradient(B_t: Tensor | None, q_B: Tensor | None) -> int:
    """K, of what is there."""
    if B_t is not None:
        return B_t.shape[1]
    assert q_B is not None
    return q_B.shape[2]


def _columns_of_weight_gradient(A: Tensor | None, q_A: Tensor | None) -> int:
    """K, of what is there."""
    found = q_A if A is None else A
    assert found is not None
    return found.shape[1]


def _on_cpu(run: Callable[..., Any], place_of_offs: int) -> Callable[..., Any]:
    """What runs on a CPU: also the check of the values in ``offs``."""

    def on_cpu(x: Tensor, *rest: Any) -> Any:
        check_ends(rest[place_of_offs - 1], x.shape[0])
        with torch.no_grad():  # autograd would follow the references, and stumbles over their views
            return run(x, *rest)

    return on_cpu


def _fake_forward(A: Tensor, B_t: Tensor, *rest: Any) -> Tensor:
    return A.new_empty(A.shape[0], B_t.shape[2], dtype=torch.bfloat16)


def _fake_input_gradient(grad: Tensor, B_t: Tensor | None, *rest: Any) -> Tensor:
    return grad.new_empty(grad.shape[0], _columns_of_input_gradient(B_t, rest[-2]), dtype=torch.bfloat16)


def _fake_weight_gradient(grad: Tensor, A: Tensor | None, offs: Tensor, *rest: Any) -> Tensor:
    shape = offs.shape[0], grad.shape[1], _columns_of_weight_gradient(A, rest[-2])
    return grad.new_empty(shape, dtype=torch.bfloat16)


def _fake_gradients(
    grad: Tensor,
    A: Tensor | None,
    q_A: Tensor | None,
    scales_A: Tensor | None,
    B_t: Tensor | None,
    q_B: Tensor | None,
    scales_B: Tensor | None,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    is_fp8: bool,
    wants_A: bool,
    wants_B: bool,
    is_row_major: bool,
) -> list[Tensor]:
    (M, N), E = grad.shape, offs.shape[0]
    shapes: list[tuple[int, ...]] = []
    if wants_A:
        shapes.append((M, _columns_of_input_gradient(B_t, q_B)))
    if wants_B:
        K = _columns_of_weight_gradient(A, q_A)
        shapes.append((E, K, N) if is_row_major else (E, N, K))
    return [grad.new_empty(shape, dtype=torch.bfloat16) for shape in shapes]


def _pass_operator(name: str, operands: str, codes: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    schema = f"grouped_mm_{name}({operands}, Tensor offs, ScalarType? float8_dtype, bool is_fp8, {codes}) -> Tensor"
    return define(schema, run, _on_cpu(run, 2), fake, makes_codes=True)


forward: Callable[..., Tensor] = _pass_operator(
    "forward",
    "Tensor A, Tensor B_t",
    "Tensor? q_A, Tensor? scales_A, Tensor? q_B, Tensor? scales_B",
    _run_forward,
    _fake_forward,
)
_pass_operator(
    "input_gradient",
    "Tensor grad, Tensor? B_t",
    "Tensor? q_grad, Tensor? scales_grad, Tensor? q_B, Tensor? scales_B",
    _run_input_gradient,
    _fake_input_gradient,
)
_pass_operator(
    "weight_gradient",
    "Tensor grad, Tensor? A",
    "Tensor? q_grad, Tensor? scales_grad, Tensor? q_A, Tensor? scales_A",
    _run_weight_gradient,
    _fake_weight_gradient,
)
gradients: Callable[..., list[Tensor]] = define(
    "grouped_mm_gradients(Tensor grad, Tensor? A, Tensor? q_A, Tensor? scales_A, Tensor? B_t, Tensor? q_B, "
    "Tensor? scales_B, Tensor offs, ScalarType? float8_dtype, bool is_fp8, bool wants_A, bool wants_B, "
    "bool is_row_major) -> Tensor[]",
    _run_gradients,
    _on_cpu(_run_gradients, 7),
    _fake_gradients,
    makes_codes=True,
)
