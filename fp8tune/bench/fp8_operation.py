"""The FP8 grouped GEMM as ``fp8tune bench --op grouped-mm`` times it: see :mod:`fp8tune_kernels.gemm.grouped_mm`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import fp8tune_kernels as kernels  # imports torch and Triton when a kernel is first named
from fp8tune.bench.operation import BF16, TORCHAO, Call, GroupedMM, Operands, Operation, Part, bf16, torchaos

if TYPE_CHECKING:
    import torch

FP8 = "fp8"
SHARED_READS = (("A",), ("A", "B_t"))
"""Operands that are read once for both passes, and grad with A."""

MULTIPLE = 16


def _ours(given: Operands, keep_fp8: tuple[str, ...] = ()) -> GroupedMM:
    return partial(kernels.fp8_grouped_mm, pad_token_groups=given.pad, keep_fp8=keep_fp8)


def _torchao(given: Operands) -> GroupedMM:
    """With a scale a row."""
    multiply = torchaos(given, "fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm", MULTIPLE)
    return partial(multiply, pad_token_groups_for_grouped_mm=False)


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

    return partial(multiply, a, b, scale_a.reciprocal(), scale_b.reciprocal(), offs)


FP8_GROUPED_MM = Operation(
    name="grouped-mm",
    recipe="fp8 rowwise",
    ours=FP8,
    multiple=MULTIPLE,
    contenders={BF16: bf16, FP8: _ours, TORCHAO: _torchao},
    variants={f"{FP8} keeping {', '.join(names)}": partial(_ours, keep_fp8=names) for names in SHARED_READS},
    parts={
        "rowwise-2d A": Part(("A",), lambda given: partial(kernels.quantize_rowwise_2d, given.A)),
        "colwise-3d B_t": Part(("B_t",), lambda given: partial(kernels.quantize_colwise_3d, given.B_t)),
        "GEMM out": Part(("A", "B_t"), _gemm_out, "out"),
        "rowwise-2d grad": Part(("grad",), lambda given: partial(kernels.quantize_rowwise_2d, given.grad)),
        "transpose-3d B_t": Part(("B_t",), lambda given: partial(_transposed, given.B_t)),
        "GEMM grad_A": Part(("grad", "B_t"), _gemm_input_gradient, "grad_A"),
        "colwise-dual grad, A": Part(
            ("grad", "A"), lambda given: partial(kernels.quantize_colwise_dual, given.grad, given.A, given.offs)
        ),
        "GEMM grad_B": Part(("grad", "A"), _gemm_weight_gradient, "grad_B"),
    },
)
