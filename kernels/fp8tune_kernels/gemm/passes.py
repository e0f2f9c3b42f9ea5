"""The three GEMMs of a step, each by any of four methods, with the casts that a method needs.

    forward           out    = A @ B_t         (M, K) x (E, K, N) -> (M, N)
    input gradient    grad_A = grad @ B        (M, N) x (E, N, K) -> (M, K)
    weight gradient   grad_B = grad.t() @ A    over the rows of each group -> (E, N, K)

    A, grad  (M, K) and (M, N), row-major
    B_t      (E, K, N), strides (K*N, 1, K)
    offs     (E,), int32: the end row of each group, non-decreasing, at most M; groups of any size, also none
    codes    of the weights, quantized before: for the forward pass those of ``colwise-3d``, for the input gradient those
             of ``transpose-3d``, each with its scales

All results are bfloat16. Rows past ``offs[-1]`` are zeros, and so is the weight gradient of a group without rows.
"""

from __future__ import annotations

import torch

__all__ = ["BF16", "BF16_TORCH", "FP8", "FP8_TORCH", "METHODS", "forward", "input_gradient", "weight_gradient"]

BF16_TORCH, BF16, FP8_TORCH, FP8 = range(4)
"""A method: what the operands are, and whose GEMM multiplies them; ours unless it says torch's."""

METHODS = ("bf16, torch's GEMM", "bf16, our GEMM", "FP8, torch's GEMM", "FP8, our GEMM")
"""Their names in tables and messages."""

Codes = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales."""


def forward(
    A: torch.Tensor,
    B_t: torch.Tensor,
    offs: torch.Tensor,
    method: int,
    float8_dtype: torch.dtype,
    codes: Codes | None = None,
) -> torch.Tensor:
    """``out``, (M, N)."""
    raise NotImplementedError


def input_gradient(
    grad: torch.Tensor,
    B_t: torch.Tensor,
    offs: torch.Tensor,
    method: int,
    float8_dtype: torch.dtype,
    codes: Codes | None = None,
) -> torch.Tensor:
    """``grad_A``, (M, K)."""
    raise NotImplementedError


def weight_gradient(
    grad: torch.Tensor, A: torch.Tensor, offs: torch.Tensor, method: int, float8_dtype: torch.dtype
) -> torch.Tensor:
    """``grad_B``, (E, N, K), row-major."""
    raise NotImplementedError
