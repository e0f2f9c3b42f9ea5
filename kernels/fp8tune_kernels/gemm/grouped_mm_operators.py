"""The operators of ``fp8_grouped_mm``: one a pass, and one for all gradients that are wanted, which is its backward.

An operator costs 4 to 11 us of host time beside what it runs (H100, torch 2.11.0). The method of a pass is chosen
inside (:mod:`.methods`): what is traced has no sizes yet. Codes and scales, where they are given, are those of
:mod:`.passes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8tune_kernels.gemm import passes, row_major
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.gemm.methods import method_for
from fp8tune_kernels.quantize import rowwise_colwise
from fp8tune_kernels.runtime.checks import check_ends, fp8_dtype_for
from fp8tune_kernels.runtime.ops import define, run
from fp8tune_kernels.spec import bucket

__all__ = ["forward", "gradients"]

_NO_CODES: tuple[Tensor | None, ...] = (None, None, None, None)


def _run_forward(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    precision: int,
    q_A: Tensor | None,
    scales_A: Tensor | None,
    q_B: Tensor | None,
    scales_B: Tensor | None,
) -> Tensor:
    (M, K), N, device = A.shape, B_t.shape[2], A.device
    method = method_for("forward", M, N, K, offs.shape[0], precision, device)
    float8_dtype = fp8_dtype_for(device, float8_dtype)
    codes_B = _pair(q_B, scales_B) or row_major.forward_codes(B_t, method, float8_dtype)
    return passes.forward(A, B_t, offs, method, float8_dtype, codes_B, _pair(q_A, scales_A))


def _run_input_gradient(
    grad: Tensor,
    B_t: Tensor | None,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    precision: int,
    q_grad: Tensor | None,
    scales_grad: Tensor | None,
    q_B: Tensor | None,
    scales_B: Tensor | None,
) -> Tensor:
    (M, N), K, device = grad.shape, _columns_of_input_gradient(B_t, q_B), grad.device
    method = method_for("input-gradient", M, N, K, offs.shape[0], precision, device)
    float8_dtype = fp8_dtype_for(device, float8_dtype)
    codes_B = _pair(q_B, scales_B) or row_major.input_gradient_codes(B_t, method, float8_dtype)
    return passes.input_gradient(grad, B_t, offs, method, float8_dtype, codes_B, _pair(q_grad, scales_grad))


def _run_weight_gradient(
    grad: Tensor,
    A: Tensor | None,
    offs: Tensor,
    float8_dtype: torch.dtype | None,
    precision: int,
    q_grad: Tensor | None,
    scales_grad: Tensor | None,
    q_A: Tensor | None,
    scales_A: Tensor | None,
    is_row_major: bool = False,
) -> Tensor:
    """(E, N, K); row-major (E, K, N), which is A.t() @ grad: the weight gradient of a layer of N inputs, K outputs."""
    (M, N), K, device = grad.shape, _columns_of_weight_gradient(A, q_A), grad.device
    method = method_for("weight-gradient", M, *((K, N) if is_row_major else (N, K)), offs.shape[0], precision, device)
    float8_dtype = fp8_dtype_for(device, float8_dtype)
    codes_grad, codes_A = _pair(q_grad, scales_grad), _pair(q_A, scales_A)
    if not is_row_major:
        return passes.weight_gradient(grad, A, offs, method, float8_dtype, codes_grad, codes_A)
    if A is None:  # of a pass whose codes are all there only the rows of its first operand are counted
        codes_grad, A = codes_grad or row_major.columns(grad, offs, float8_dtype), grad
    return passes.weight_gradient(A, grad, offs, method, float8_dtype, codes_A, codes_grad)


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
    precision: int,
    wants_A: bool,
    wants_B: bool,
    is_row_major: bool,
) -> list[Tensor]:
    """Those that are wanted: of A, (M, K), and of the weights, (E, N, K), or (E, K, N) if they are row-major.

    Where A is codes, one read casts grad for both.
    """
    options = offs, float8_dtype, precision
    q, scales, q_columns, scales_columns = _NO_CODES
    if q_A is not None and wants_A and wants_B:
        key = bucket(grad.shape[0]), grad.shape[1], offs.shape[0]
        inputs = grad, offs, fp8_dtype_for(grad.device, float8_dtype), True, ALIGNMENT
        q, scales, q_columns, scales_columns = run(rowwise_colwise.SPEC, key, inputs)
    found = []
    if wants_A:
        found.append(_run_input_gradient(grad, B_t, *options, q, scales, q_B, scales_B))
        del q  # what the other gradient would have beside its own
    if wants_B:
        given = q_columns, scales_columns, q_A, scales_A
        found.append(_run_weight_gradient(grad, A, *options, *given, is_row_major))
    return found


def _pair(q: Tensor | None, scales: Tensor | None) -> passes.Codes | None:
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
    precision: int,
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


def _of_a_pass(name: str, operands: str, codes: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    schema = f"grouped_mm_{name}({operands}, Tensor offs, ScalarType? float8_dtype, int precision, {codes}) -> Tensor"
    return define(schema, run, _on_cpu(run, 2), fake, makes_codes=True)


forward: Callable[..., Tensor] = _of_a_pass(
    "forward",
    "Tensor A, Tensor B_t",
    "Tensor? q_A, Tensor? scales_A, Tensor? q_B, Tensor? scales_B",
    _run_forward,
    _fake_forward,
)
_of_a_pass(
    "input_gradient",
    "Tensor grad, Tensor? B_t",
    "Tensor? q_grad, Tensor? scales_grad, Tensor? q_B, Tensor? scales_B",
    _run_input_gradient,
    _fake_input_gradient,
)
_of_a_pass(
    "weight_gradient",
    "Tensor grad, Tensor? A",
    "Tensor? q_grad, Tensor? scales_grad, Tensor? q_A, Tensor? scales_A",
    _run_weight_gradient,
    _fake_weight_gradient,
)
gradients: Callable[..., list[Tensor]] = define(
    "grouped_mm_gradients(Tensor grad, Tensor? A, Tensor? q_A, Tensor? scales_A, Tensor? B_t, Tensor? q_B, "
    "Tensor? scales_B, Tensor offs, ScalarType? float8_dtype, int precision, bool wants_A, bool wants_B, "
    "bool is_row_major) -> Tensor[]",
    _run_gradients,
    _on_cpu(_run_gradients, 7),
    _fake_gradients,
    makes_codes=True,
)
