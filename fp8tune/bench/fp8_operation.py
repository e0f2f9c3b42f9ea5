"""The FP8 grouped GEMM as ``fp8tune bench --op grouped-mm`` times it: see :mod:`fp8tune_kernels.gemm.grouped_mm`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fp8tune_kernels as kernels  # imports torch and Triton when a kernel is first named
from fp8tune.bench.grouped_rivals import bf16, torchao_fp8
from fp8tune.bench.operation import BF16, TORCHAO, Call, GroupedMM, Operands, Operation, Part, on_operands

if TYPE_CHECKING:
    import torch

FP8 = "fp8"
SHARED_READS = (("A",), ("A", "B_t"))
"""Operands that are read once for both passes, and grad with A."""


def _ours(given: Operands, keep_fp8: tuple[str, ...] = ()) -> GroupedMM:
    return lambda A, B_t, offs: kernels.fp8_grouped_mm(A, B_t, offs, pad_token_groups=given.pad, keep_fp8=keep_fp8)


def _transposed(B_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from fp8tune_kernels.gemm import grouped_mm

    codes, scales = grouped_mm.quantize_transposed(B_t)
    return codes, scales


def _gemm_out(given: Operands) -> Call:
    return _rows_times_experts(given.A, kernels.quantize_colwise_3d(given.B_t), given.offs)


def _gemm_input_gradient(given: Operands) -> Call:
    return _rows_times_experts(given.grad, _transposed(given.B_t), given.offs)


def _gemm_weight_gradient(given: Operands) -> Call:
    q_grad, scales_grad, q_A, scales_A = kernels.quantize_colwise_dual(given.grad, given.A, given.offs)
    return _multiplication(q_grad.t(), q_A, scales_grad, scales_A, given.offs)


def _rows_times_experts(rows: torch.Tensor, experts: tuple[torch.Tensor, torch.Tensor], offs: torch.Tensor) -> Call:
    codes, scales = kernels.quantize_rowwise_2d(rows)
    return _multiplication(codes, experts[0], scales.squeeze(1), experts[1].squeeze(1), offs)


def _multiplication(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, offs: torch.Tensor
) -> Call:
    """A GEMM on reciprocals that are there already."""
    from fp8tune_kernels.gemm.scaled_gemm import multiply

    inverse_a, inverse_b = scale_a.reciprocal(), scale_b.reciprocal()
    return lambda: multiply(a, b, inverse_a, inverse_b, offs)


FP8_GROUPED_MM = Operation(
    name="grouped-mm",
    recipe="fp8 rowwise",
    ours=FP8,
    multiple=16,
    contenders={BF16: bf16, FP8: _ours, TORCHAO: torchao_fp8},
    variants={f"{FP8} keeping {', '.join(names)}": partial(_ours, keep_fp8=names) for names in SHARED_READS},
    parts={
        "rowwise-2d A": Part(
            lambda M, N, K, G: 3 * M * K, on_operands(lambda given: kernels.quantize_rowwise_2d(given.A))
        ),
        "colwise-3d B_t": Part(
            lambda M, N, K, G: 3 * G * K * N, on_operands(lambda given: kernels.quantize_colwise_3d(given.B_t))
        ),
        "GEMM out": Part(lambda M, N, K, G: M * K + G * K * N + 2 * M * N, _gemm_out),
        "rowwise-2d grad": Part(
            lambda M, N, K, G: 3 * M * N, on_operands(lambda given: kernels.quantize_rowwise_2d(given.grad))
        ),
        "transpose-3d B_t": Part(lambda M, N, K, G: 3 * G * K * N, on_operands(lambda given: _transposed(given.B_t))),
        "GEMM grad_A": Part(lambda M, N, K, G: M * N + G * K * N + 2 * M * K, _gemm_input_gradient),
        "colwise-dual grad, A": Part(
            lambda M, N, K, G: 3 * M * (N + K),
            on_operands(lambda given: kernels.quantize_colwise_dual(given.grad, given.A, given.offs)),
        ),
        "GEMM grad_B": Part(lambda M, N, K, G: M * (N + K) + 2 * G * K * N, _gemm_weight_gradient),
    },
)
