"""``bench --op grouped-mm``: FP8 with a scale a row, see :mod:`fp8tune_kernels.gemm.grouped_mm`.

No group is padded. The codes that the weight gradient reads lie in groups that begin at multiples of 128 rows: the
kernel that writes them lays them out so, and torch's GEMM takes them too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import fp8tune_kernels as kernels  # imports torch and Triton when a kernel is first named
from fp8tune.bench import torchao_grouped
from fp8tune.bench.counterparts import aligned_ends
from fp8tune.bench.operation import (
    BF16,
    BF16_OF_OURS,
    BF16_OF_TORCH,
    FP8,
    FP8_OF_TORCH,
    TORCHAO,
    Call,
    GroupedMM,
    Operands,
    Operation,
    Part,
    Quantized,
    bf16,
)

if TYPE_CHECKING:
    import torch

AUTO, FOLDED = "auto", "folded"
FP8_ONCE, FOLDED_ONCE = (f"{who}, weights once" for who in (FP8, FOLDED))
MULTIPLE = 16


def _ours(given: Operands, **options: Any) -> GroupedMM:
    return partial(kernels.fp8_grouped_mm, **options)


def _once(given: Operands, recipe: str = "default", **options: Any) -> GroupedMM:
    """The step on a handle that is there already; gradients reach the weights themselves."""
    handle = _handle(given, recipe)

    def multiply(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return kernels.fp8_grouped_mm(A, handle, offs, **options)

    return multiply


def _handle(given: Operands, recipe: str = "default") -> Any:
    from fp8tune_kernels.gemm.quantized_weights import quantize_weights

    return quantize_weights(given.B_t, recipe=recipe)


def _torchao(given: Operands) -> GroupedMM:
    multiply = torchao_grouped.grouped_mm("fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm")
    multiply = partial(multiply, pad_token_groups_for_grouped_mm=False)
    return torchao_grouped.padded(multiply, given.offs, MULTIPLE) if given.pad else multiply


# Operands of the GEMMs: codes and scales


def _forward_codes(given: Operands) -> tuple[Quantized, Quantized]:
    return kernels.quantize_rowwise_2d(given.A), kernels.quantize_colwise_3d(given.B_t)


def _input_gradient_codes(given: Operands) -> tuple[Quantized, Quantized]:
    return kernels.quantize_rowwise_2d(given.grad), kernels.quantize_transpose_3d_atomic(given.B_t)


def _aligned(given: Operands) -> tuple[torch.Tensor, ...]:
    """Codes and scales of grad and A by columns of each group."""
    from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT

    return kernels.quantize_colwise_dual(given.grad, given.A, given.offs, alignment=ALIGNMENT)


# GEMMs on them: ours takes scales as kernels write them, torch's their reciprocals


def _rows(codes: tuple[Quantized, Quantized], offs: torch.Tensor) -> Call:
    from fp8tune_kernels.gemm.grouped_rows import multiply_rows

    (q_rows, scales_rows), (q_experts, scales_experts) = codes
    return partial(multiply_rows, q_rows, q_experts.transpose(1, 2), offs, scales_rows, scales_experts)


def _rows_of_torch(codes: tuple[Quantized, Quantized], offs: torch.Tensor) -> Call:
    from fp8tune_kernels.gemm.scaled_gemm import multiply

    (q_rows, scales_rows), (q_experts, scales_experts) = codes
    inverse = scales_rows.squeeze(1).reciprocal(), scales_experts.squeeze(1).reciprocal()
    return partial(multiply, q_rows, q_experts, *inverse, offs)


def _contraction(given: Operands) -> Call:
    from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT, contract_rows

    q_grad, scales_grad, q_A, scales_A = _aligned(given)
    return partial(contract_rows, q_grad, q_A, given.offs, scales_grad, scales_A, ALIGNMENT)


def _contraction_of_torch(given: Operands) -> Call:
    from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
    from fp8tune_kernels.gemm.scaled_gemm import multiply

    q_grad, scales_grad, q_A, scales_A = _aligned(given)
    inverse = scales_grad.reciprocal(), scales_A.reciprocal()
    return partial(multiply, q_grad.t(), q_A, *inverse, aligned_ends(given.offs, ALIGNMENT))


# GEMMs of bfloat16 on operands as they are


def _bf16_of_torch(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Call:
    import torch

    return partial(torch._grouped_mm, a, b, offs=offs)


def _bf16_rows(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> Call:
    """Multiply by our GEMM, with a copy of weights that do not lie along what it contracts."""
    from fp8tune_kernels.gemm.grouped_rows import multiply_rows

    return lambda: multiply_rows(rows, weights.mT.contiguous(), offs)


def _bf16_contraction(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Call:
    from fp8tune_kernels.gemm.grouped_contraction import contract_rows

    return partial(contract_rows, a, b, offs)


FP8_GROUPED_MM = Operation(
    name="grouped-mm",
    recipe="fp8 rowwise",
    ours=FP8,
    multiple=MULTIPLE,
    pads=False,
    contenders={
        BF16: bf16,
        FP8: _ours,
        FP8_ONCE: _once,
        AUTO: partial(_ours, precision="auto"),
        FOLDED: partial(_ours, recipe="folded"),
        FOLDED_ONCE: partial(_once, recipe="folded"),
        TORCHAO: _torchao,
    },
    once={FP8_ONCE: FP8, FOLDED_ONCE: FOLDED},
    quantize_weights={
        FP8: lambda given: partial(_handle, given),
        FOLDED: lambda given: partial(_handle, given, "folded"),
    },
    weight_casts=("colwise-3d B_t", "transpose-3d B_t"),
    # operands that are read once for both passes, and grad with A
    variants={f"{FP8} keeping {', '.join(names)}": partial(_ours, keep_fp8=names) for names in (("A",), ("A", "B_t"))},
    parts={
        "rowwise-2d A": Part(("A",), lambda given: partial(kernels.quantize_rowwise_2d, given.A)),
        "colwise-3d B_t": Part(("B_t",), lambda given: partial(kernels.quantize_colwise_3d, given.B_t)),
        "GEMM out": Part(("A", "B_t"), lambda given: _rows(_forward_codes(given), given.offs), "out"),
        "rowwise-2d grad": Part(("grad",), lambda given: partial(kernels.quantize_rowwise_2d, given.grad)),
        "transpose-3d B_t": Part(("B_t",), lambda given: partial(kernels.quantize_transpose_3d_atomic, given.B_t)),
        "GEMM grad_A": Part(("grad", "B_t"), lambda given: _rows(_input_gradient_codes(given), given.offs), "grad_A"),
        "colwise-dual grad, A": Part(("grad", "A"), lambda given: partial(_aligned, given)),
        "GEMM grad_B": Part(("grad", "A"), _contraction, "grad_B"),
    },
    other_gemms={
        "GEMM out": {
            BF16_OF_TORCH: Part(
                ("A", "B_t"), lambda given: _bf16_of_torch(given.A, given.B_t, given.offs), "out", width=2
            ),
            BF16_OF_OURS: Part(("A", "B_t"), lambda given: _bf16_rows(given.A, given.B_t, given.offs), "out", width=2),
            FP8_OF_TORCH: Part(("A", "B_t"), lambda given: _rows_of_torch(_forward_codes(given), given.offs), "out"),
        },
        "GEMM grad_A": {
            BF16_OF_TORCH: Part(
                ("grad", "B_t"), lambda given: _bf16_of_torch(given.grad, given.B_t.mT, given.offs), "grad_A", width=2
            ),
            BF16_OF_OURS: Part(
                ("grad", "B_t"),
                lambda given: _bf16_rows(given.grad, given.B_t.mT, given.offs),
                "grad_A",
                width=2,
            ),
            FP8_OF_TORCH: Part(
                ("grad", "B_t"), lambda given: _rows_of_torch(_input_gradient_codes(given), given.offs), "grad_A"
            ),
        },
        "GEMM grad_B": {
            BF16_OF_TORCH: Part(
                ("grad", "A"), lambda given: _bf16_of_torch(given.grad.t(), given.A, given.offs), "grad_B", width=2
            ),
            BF16_OF_OURS: Part(
                ("grad", "A"),
                lambda given: _bf16_contraction(given.grad, given.A, given.offs),
                "grad_B",
                width=2,
            ),
            FP8_OF_TORCH: Part(("grad", "A"), _contraction_of_torch, "grad_B"),
        },
    },
)
