"""The three GEMMs of a step, each by any of four methods, with the casts that a method needs.

    forward           out    = A @ B_t         (M, K) x (E, K, N) -> (M, N)
    input gradient    grad_A = grad @ B        (M, N) x (E, N, K) -> (M, K)
    weight gradient   grad_B = grad.t() @ A    over the rows of each group -> (E, N, K)

    A, grad  (M, K) and (M, N), row-major
    B_t      (E, K, N), strides (K*N, 1, K)
    offs     (E,), int32: the end row of each group, non-decreasing, at most M; groups of any size, also none
    codes    of an operand, quantized before, with their scales: of A by ``rowwise-2d`` in the forward pass and, like
             grad, by ``colwise`` with ALIGNMENT in the weight gradient, of grad by ``rowwise-2d`` in the input
             gradient, of B_t by ``colwise-3d`` and ``transpose-3d``

All results are bfloat16. Rows past ``offs[-1]`` are zeros, and so is the weight gradient of a group without rows.

A pass is called with the device of its operands as the current one, on operands that were checked, and goes through no
dispatcher: kernels are launched one after the other. On a CPU it is the reference of each.
"""

from __future__ import annotations

import torch

from fp8tune_kernels.catalog import METHODS
from fp8tune_kernels.gemm import grouped_contraction, grouped_rows, token_groups
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.gemm.scaled_gemm import multiply
from fp8tune_kernels.quantize import colwise, colwise_3d, colwise_dual, rowwise_2d, transpose_3d_atomic
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.runtime.ops import run
from fp8tune_kernels.spec import DTYPES, KernelSpec, bucket

__all__ = ["BF16", "BF16_TORCH", "FP8", "FP8_TORCH", "METHODS", "forward", "input_gradient", "weight_gradient"]

BF16_TORCH, BF16, FP8_TORCH, FP8 = range(4)
"""A method: what the operands are, and whose GEMM multiplies them; ours unless it says torch's. Its name is in
:data:`METHODS`."""

Codes = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales."""

_DTYPE_FLAGS = {getattr(torch, name): flag for flag, name in enumerate(DTYPES)}

_ZEROS_EMPTY_GROUPS = ("sm_90",)
"""Where ``torch._grouped_mm`` writes the zeros of a group without rows (pytorch/pytorch#172439: not on sm_100)."""


def forward(
    A: torch.Tensor,
    B_t: torch.Tensor | None,
    offs: torch.Tensor,
    method: int,
    float8_dtype: torch.dtype,
    codes: Codes | None = None,
    codes_A: Codes | None = None,
) -> torch.Tensor:
    """``out``, (M, N). B_t is not read where its codes are given and the method multiplies in FP8."""
    if method in (BF16_TORCH, BF16):
        return _rows_of_bfloat16(A, B_t, offs, method)
    codes = codes or _quantized_weights(colwise_3d.SPEC, B_t, float8_dtype)
    return _rows_of_codes(codes_A or _quantized_rows(A, float8_dtype), codes, offs, method)


def input_gradient(
    grad: torch.Tensor,
    B_t: torch.Tensor | None,
    offs: torch.Tensor,
    method: int,
    float8_dtype: torch.dtype,
    codes: Codes | None = None,
    codes_grad: Codes | None = None,
) -> torch.Tensor:
    """``grad_A``, (M, K). B_t is not read where its codes are given and the method multiplies in FP8."""
    if method in (BF16_TORCH, BF16):
        return _rows_of_bfloat16(grad, None if B_t is None else B_t.transpose(1, 2), offs, method)
    # us on an H100, atomic / reduction: 67 / 88 at one expert of 8192 x 5120, 801 / 1,131 at 16, 254 / 247 at 64 small
    codes = codes or _quantized_weights(transpose_3d_atomic.SPEC, B_t, float8_dtype)
    return _rows_of_codes(codes_grad or _quantized_rows(grad, float8_dtype), codes, offs, method)


def weight_gradient(
    grad: torch.Tensor,
    A: torch.Tensor | None,
    offs: torch.Tensor,
    method: int,
    float8_dtype: torch.dtype,
    codes_grad: Codes | None = None,
    codes_A: Codes | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``grad_B``, (E, N, K), row-major. A is not read where its codes are given and the method multiplies in FP8.

    ``out``: bfloat16 or float32 to add ``grad_B`` to, and to return.
    """
    if method in (BF16_TORCH, BF16):
        assert A is not None
        return _added(_contraction_of_bfloat16(grad, A, offs, method), out)
    if not codes_A and not codes_grad and A is not None and A.dtype == grad.dtype:
        key = bucket(grad.shape[0]), grad.shape[1], A.shape[1], offs.shape[0]
        inputs = grad, A, offs, float8_dtype, True, ALIGNMENT
        q_grad, scales_grad, q_A, scales_A = run(colwise_dual.SPEC, key, inputs)
        codes_grad, codes_A = (q_grad, scales_grad), (q_A, scales_A)
    else:  # A in float32 is quantized from float32
        codes_grad = codes_grad or _quantized_columns(grad, offs, float8_dtype)
        codes_A = codes_A or _quantized_columns(A, offs, float8_dtype)
    return _contraction_of_codes(codes_grad, codes_A, offs, method, grad.shape[0], out)


def _added(product: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return product if out is None else out.add_(product)


# The casts


def _quantized_rows(x: torch.Tensor, float8_dtype: torch.dtype) -> Codes:
    q, scales = run(rowwise_2d.SPEC, (bucket(x.shape[0]), x.shape[1]), (x, float8_dtype, True))
    return q, scales


def _quantized_columns(x: torch.Tensor | None, offs: torch.Tensor, float8_dtype: torch.dtype) -> Codes:
    assert x is not None
    key = bucket(x.shape[0]), x.shape[1], offs.shape[0]
    q, scales = run(colwise.SPEC, key, (x, offs, float8_dtype, True, ALIGNMENT))
    return q, scales


def _quantized_weights(spec: KernelSpec, B_t: torch.Tensor | None, float8_dtype: torch.dtype) -> Codes:
    assert B_t is not None
    q, scales = run(spec, tuple(B_t.shape), (B_t, float8_dtype, True))
    return q, scales


# The GEMMs


def _rows_of_bfloat16(a: torch.Tensor, b: torch.Tensor | None, offs: torch.Tensor, method: int) -> torch.Tensor:
    """``a @ b`` of each group; b is (E, K, N) of any strides."""
    assert b is not None
    if method == BF16_TORCH and not a.is_cpu and a.shape[0]:
        out = torch._grouped_mm(a, b, offs=offs)
        token_groups.zero_rows(out, offs)  # it leaves them as they were
        return out
    if method == BF16_TORCH and a.is_cpu:
        return grouped_rows.reference(a, b.mT, offs, None, None)[0]
    b = b.mT.contiguous()  # of the input gradient a copy: our GEMM reads weights along what it contracts
    return _multiply_rows(a, b, offs, None, None)


def _rows_of_codes(of_a: Codes, of_b: Codes, offs: torch.Tensor, method: int) -> torch.Tensor:
    (q_a, scales_a), (q_b, scales_b) = of_a, of_b
    if method == FP8 or not q_a.shape[0]:
        return _multiply_rows(q_a, q_b.mT, offs, scales_a, scales_b)
    if q_a.is_cpu:
        return grouped_rows.reference(q_a, q_b.mT, offs, scales_a, scales_b)[0]
    inverse_a, inverse_b = torch._foreach_reciprocal([scales_a, scales_b])
    out = multiply(q_a, q_b, inverse_a.squeeze(1), inverse_b.squeeze(1), offs)
    token_groups.zero_rows(out, offs)  # it leaves them as they were
    return out


def _multiply_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scales_a: torch.Tensor | None,
    scales_b: torch.Tensor | None,
) -> torch.Tensor:
    """Our GEMM, of b as it lies: (E, N, K)."""
    (M, K), (G, N, _) = a.shape, b.shape
    key = bucket(M), N, K, G, _DTYPE_FLAGS[a.dtype]
    (out,) = run(grouped_rows.SPEC, key, (a, b, offs, scales_a, scales_b))
    return out


def _contraction_of_bfloat16(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, method: int) -> torch.Tensor:
    """``a.t() @ b`` over the rows of each group."""
    if not a.shape[0]:
        return a.new_zeros(offs.shape[0], a.shape[1], b.shape[1])
    if method == BF16:
        return _contract_rows(a, b, offs, None, None, 1, a.shape[0])
    if a.is_cpu:
        return grouped_contraction.reference(a, b, offs, None, None, 1)[0]
    out = torch._grouped_mm(a.t(), b, offs=offs)
    if running_arch(a.device) not in _ZEROS_EMPTY_GROUPS:
        token_groups.zero_empty_groups(out, offs)
    return out


def _contraction_of_codes(
    of_a: Codes, of_b: Codes, offs: torch.Tensor, method: int, rows: int, out: torch.Tensor | None
) -> torch.Tensor:
    """The same, of codes in groups that begin at multiples of ALIGNMENT; ``rows``: how many there are without."""
    (q_a, scales_a), (q_b, scales_b) = of_a, of_b
    if not rows:
        zeros = torch.zeros(offs.shape[0], q_a.shape[1], q_b.shape[1], dtype=torch.bfloat16, device=q_a.device)
        return zeros if out is None else out
    if method == FP8:
        return _contract_rows(q_a, q_b, offs, scales_a, scales_b, ALIGNMENT, rows, out)
    if q_a.is_cpu:
        return _added(grouped_contraction.reference(q_a, q_b, offs, scales_a, scales_b, ALIGNMENT)[0], out)
    inverse_a, inverse_b = torch._foreach_reciprocal([scales_a, scales_b])
    return _added(multiply(q_a.t(), q_b, inverse_a, inverse_b, token_groups.padded_ends(offs, ALIGNMENT)), out)


def _contract_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scales_a: torch.Tensor | None,
    scales_b: torch.Tensor | None,
    alignment: int,
    rows: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Our GEMM. ``out``: what its product is added to, in place."""
    key = bucket(rows), a.shape[1], b.shape[1], offs.shape[0], _DTYPE_FLAGS[a.dtype]
    inputs = a, b, offs, scales_a, scales_b, alignment, out
    (product,) = run(grouped_contraction.SPEC, key, inputs, None if out is None else (out,))
    return product
