"""Casts and grouped products of one pass, on operands that were checked, without a dispatcher.

    multiply, multiply_bf16    rows of each expert times its weights: (M, X) x (E, X, Y) -> (M, Y)
    contract, contract_bf16    a.t() @ b over the rows of each expert: (M, N), (M, K) -> (E, N, K)

``offs``, (E,), int32, holds the end row of each expert's group, non-decreasing, at most M. Results are bfloat16. Rows
past ``offs[-1]`` are zeros, and so is the product of an expert without rows. FP8 products run our GEMMs, products of
bfloat16 those of torch. The device of the operands is the current one. On a CPU everything runs in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantize import colwise, colwise_3d, colwise_dual, rowwise_2d, transpose_3d_atomic
from ..runtime.lookup import running_arch
from ..runtime.ops import run
from ..spec import DTYPES, bucket
from . import grouped_contraction, grouped_rows, token_groups
from .grouped_contraction import ALIGNMENT

__all__ = [
    "Quantized",
    "contract",
    "contract_bf16",
    "multiply",
    "multiply_bf16",
    "quantize_both_columns",
    "quantize_columns",
    "quantize_rows",
    "quantize_stored",
]

Quantized = tuple[Tensor, Tensor]
"""FP8 values and scales."""

_DTYPE_FLAGS = {getattr(torch, name): flag for flag, name in enumerate(DTYPES)}

_ZEROS_EMPTY_GROUPS = ("sm_90",)
"""Arches where ``torch._grouped_mm`` writes zeros for a group without rows (pytorch/pytorch#172439: not sm_100)."""


# Casts


def quantize_rows(x: Tensor, float8_dtype: torch.dtype) -> Quantized:
    """Return FP8 values of a matrix with a scale per row."""
    q, scales = run(rowwise_2d.SPEC, (bucket(x.shape[0]), x.shape[1]), (x, float8_dtype, True))
    return q, scales


def quantize_columns(x: Tensor, offs: Tensor, float8_dtype: torch.dtype) -> Quantized:
    """Return FP8 values of rows with a scale per column of each group, as :func:`contract` takes them."""
    key = bucket(x.shape[0]), x.shape[1], offs.shape[0]
    q, scales = run(colwise.SPEC, key, (x, offs, float8_dtype, True, ALIGNMENT))
    return q, scales


def quantize_both_columns(a: Tensor, b: Tensor, offs: Tensor, float8_dtype: torch.dtype) -> tuple[Quantized, Quantized]:
    """Return :func:`quantize_columns` of two matrices of one dtype, by one launch."""
    key = bucket(a.shape[0]), a.shape[1], b.shape[1], offs.shape[0]
    q_a, scales_a, q_b, scales_b = run(colwise_dual.SPEC, key, (a, b, offs, float8_dtype, True, ALIGNMENT))
    return (q_a, scales_a), (q_b, scales_b)


def quantize_stored(w: Tensor, float8_dtype: torch.dtype) -> Quantized:
    """Return FP8 values (E, columns, rows), a view, and a scale per row of weights (E, rows, columns).

    Weights lie row-major, or are ``.mT`` of row-major weights; the values lie as :func:`multiply` takes them.
    """
    if w.is_contiguous():
        view = w.mT
        q, scales = run(colwise_3d.SPEC, tuple(view.shape), (view, float8_dtype, True))
    else:
        # us on an H100, atomic / reduction: 67 / 88 at one expert of 8192 x 5120, 801 / 1,131 at 16, 254 / 247 at 64
        # small ones
        q, scales = run(transpose_3d_atomic.SPEC, tuple(w.shape), (w, float8_dtype, True))
    return q, scales


# Products


def multiply(rows: Quantized, weights: Quantized, offs: Tensor) -> Tensor:
    """Return the product of rows with a scale per row and weights (E, X, Y), strides (X*Y, 1, X), scales (E, 1, Y)."""
    (a, scales_a), (b, scales_b) = rows, weights
    (M, X), (E, _, Y) = a.shape, b.shape
    key = bucket(M), Y, X, E, _DTYPE_FLAGS[a.dtype]
    (out,) = run(grouped_rows.SPEC, key, (a, b.mT, offs, scales_a, scales_b))
    return out


def contract(of_a: Quantized, of_b: Quantized, offs: Tensor, rows: int, out: Tensor | None = None) -> Tensor:
    """Return the product over rows of what :func:`quantize_columns` returns of ``rows`` rows.

    ``out``: bfloat16 or float32 to add the product to, and to return.
    """
    (a, scales_a), (b, scales_b) = of_a, of_b
    if not rows:
        zeros = torch.zeros(offs.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16, device=a.device)
        return zeros if out is None else out
    key = bucket(rows), a.shape[1], b.shape[1], offs.shape[0], _DTYPE_FLAGS[a.dtype]
    inputs = a, b, offs, scales_a, scales_b, ALIGNMENT, out
    (product,) = run(grouped_contraction.SPEC, key, inputs, None if out is None else (out,))
    return product


def multiply_bf16(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Return the product of rows and weights (E, X, Y), stored either way."""
    if rows.is_cpu:
        return grouped_rows.reference(rows, weights.mT, offs, None, None)[0]
    if not rows.shape[0]:
        return rows.new_empty(0, weights.shape[2])
    out = torch._grouped_mm(rows, weights, offs=offs)
    token_groups.zero_rows(out, offs)  # torch leaves rows past the last group unwritten
    return out


def contract_bf16(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return the product over rows."""
    if not a.shape[0]:
        return a.new_zeros(offs.shape[0], a.shape[1], b.shape[1])
    if a.is_cpu:
        return grouped_contraction.reference(a, b, offs, None, None, 1)[0]
    out = torch._grouped_mm(a.t(), b, offs=offs)
    if running_arch(a.device) not in _ZEROS_EMPTY_GROUPS:
        token_groups.zero_empty_groups(out, offs)
    return out
