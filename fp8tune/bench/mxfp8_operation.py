"""The MXFP8 grouped GEMM as ``fp8tune bench --op mxfp8-grouped-mm`` times it.

Between quantizing and each GEMM stands a part named for the scales. Natively it lays them out in blocks; where the GEMM
is emulated it multiplies them into the codes, to bfloat16 operands of a bfloat16 GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import fp8tune_kernels as kernels  # imports torch and Triton when a kernel is first named
from fp8tune.bench.grouped_rivals import bf16, torchao_mxfp8
from fp8tune.bench.operation import BF16, TORCHAO, Call, GroupedMM, Operands, Operation, Part, on_operands
from fp8tune_kernels.arches import MXFP8_GEMM_ARCHES

if TYPE_CHECKING:
    import torch

MXFP8 = "mxfp8"
Quantized = tuple["torch.Tensor", "torch.Tensor"]
"""Codes and scales."""

Prepare = Callable[[], tuple["torch.Tensor", ...]]


def _ours(given: Operands) -> GroupedMM:
    return lambda A, B_t, offs: kernels.mxfp8_grouped_mm(A, B_t, offs, pad_token_groups=given.pad)


def _dim0(x: torch.Tensor) -> Quantized:
    return _quantized(kernels.quantize_mxfp8_dim0, x)


def _dim1(x: torch.Tensor) -> Quantized:
    return _quantized(kernels.quantize_mxfp8_dim1, x)


def _dim1_3d(B_t: torch.Tensor) -> Quantized:
    return _quantized(kernels.quantize_mxfp8_dim1_3d, B_t.mT)


def _quantized(kernel: Callable[..., Quantized], x: torch.Tensor) -> Quantized:
    from fp8tune_kernels.gemm.grouped_mxfp8 import quantize

    return quantize(kernel, x)


def _experts(B_t: torch.Tensor) -> Quantized:
    """The weights with blocks along K, as the forward pass has them: all experts' rows in one matrix."""
    E, K, N = B_t.shape
    codes, scales = _dim0(B_t.mT.reshape(E * N, K))
    return codes.view(E, N, K).mT, scales.view(E, N, -1)


def _scales_out(given: Operands) -> Prepare:
    return _rows_times_experts(_dim0(given.A), _experts(given.B_t), given.offs)


def _scales_input_gradient(given: Operands) -> Prepare:
    return _rows_times_experts(_dim0(given.grad), _dim1_3d(given.B_t), given.offs)


def _scales_weight_gradient(given: Operands) -> Prepare:
    from fp8tune_kernels.gemm.grouped_mxfp8 import operands_of_groups

    q_grad, scales_grad = _dim1(given.grad)
    q_A, scales_A = _dim1(given.A)
    return lambda: operands_of_groups(q_grad.t(), scales_grad, q_A, scales_A, given.offs)


def _rows_times_experts(rows: Quantized, experts: Quantized, offs: torch.Tensor) -> Prepare:
    from fp8tune_kernels.gemm.grouped_mxfp8 import operands_of_rows

    return lambda: operands_of_rows(*rows, *experts, offs)


def _gemm(scales: Callable[[Operands], Prepare]) -> Callable[[Operands], Call]:
    """The GEMM on what a part named for scales makes."""

    def prepare(given: Operands) -> Call:
        from fp8tune_kernels.gemm.grouped_mxfp8 import multiply

        operands = scales(given)()
        return lambda: multiply(operands, given.offs)

    return prepare


MXFP8_GROUPED_MM = Operation(
    name="mxfp8-grouped-mm",
    recipe="mxfp8",
    ours=MXFP8,
    multiple=32,
    contenders={BF16: bf16, MXFP8: _ours, TORCHAO: torchao_mxfp8},
    parts={
        "mxfp8-dim0 A": Part(lambda M, N, K, G: 3 * M * K, on_operands(lambda given: _dim0(given.A))),
        "mxfp8-dim0 B_t": Part(lambda M, N, K, G: 3 * G * K * N, on_operands(lambda given: _experts(given.B_t))),
        "scales out": Part(lambda M, N, K, G: 3 * (M * K + G * K * N), _scales_out),
        "GEMM out": Part(lambda M, N, K, G: M * K + G * K * N + 2 * M * N, _gemm(_scales_out)),
        "mxfp8-dim0 grad": Part(lambda M, N, K, G: 3 * M * N, on_operands(lambda given: _dim0(given.grad))),
        "mxfp8-dim1-3d B_t": Part(lambda M, N, K, G: 3 * G * K * N, on_operands(lambda given: _dim1_3d(given.B_t))),
        "scales grad_A": Part(lambda M, N, K, G: 3 * (M * N + G * K * N), _scales_input_gradient),
        "GEMM grad_A": Part(lambda M, N, K, G: M * N + G * K * N + 2 * M * K, _gemm(_scales_input_gradient)),
        "mxfp8-dim1 grad": Part(lambda M, N, K, G: 3 * M * N, on_operands(lambda given: _dim1(given.grad))),
        "mxfp8-dim1 A": Part(lambda M, N, K, G: 3 * M * K, on_operands(lambda given: _dim1(given.A))),
        "scales grad_B": Part(lambda M, N, K, G: 3 * M * (N + K), _scales_weight_gradient),
        "GEMM grad_B": Part(lambda M, N, K, G: M * (N + K) + 2 * G * K * N, _gemm(_scales_weight_gradient)),
    },
    native_arches=MXFP8_GEMM_ARCHES,
)
