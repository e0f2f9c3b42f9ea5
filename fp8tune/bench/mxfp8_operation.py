"""The MXFP8 grouped GEMM as ``fp8tune bench --op mxfp8-grouped-mm`` times it.

Between quantizing and each GEMM stands a part named for the scales. Natively it lays them out in blocks; where the GEMM
is emulated it multiplies them into the codes, to bfloat16 operands of a bfloat16 GEMM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import fp8tune_kernels as kernels  # imports torch and Triton when a kernel is first named
from fp8tune.bench.operation import BF16, TORCHAO, Call, GroupedMM, Operands, Operation, Part, bf16, torchaos
from fp8tune_kernels.arches import MXFP8_GEMM_ARCHES

if TYPE_CHECKING:
    import torch

MXFP8 = "mxfp8"
MULTIPLE = 32
Quantized = tuple["torch.Tensor", "torch.Tensor"]
"""Codes and scales."""


def _ours(given: Operands) -> GroupedMM:
    return partial(kernels.mxfp8_grouped_mm, pad_token_groups=given.pad)


def _torchao(given: Operands) -> GroupedMM:
    """With ``rceil`` scales, as ours; emulated in plain torch where ours is emulated too."""
    from fp8tune_kernels.gemm.grouped_mxfp8 import mxfp8_path

    multiply = torchaos(given, "mxfp8_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm", MULTIPLE)
    preference: Any = importlib.import_module("torchao.quantization.quantize_.common").KernelPreference
    is_emulated = mxfp8_path(given.A.device) == "emulated"
    return partial(multiply, kernel_preference=preference.EMULATED if is_emulated else preference.AUTO)


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


def _scales_out(given: Operands) -> Call:
    return _rows_times_experts(_dim0(given.A), _experts(given.B_t), given.offs)


def _scales_input_gradient(given: Operands) -> Call:
    return _rows_times_experts(_dim0(given.grad), _dim1_3d(given.B_t), given.offs)


def _scales_weight_gradient(given: Operands) -> Call:
    from fp8tune_kernels.gemm.grouped_mxfp8 import operands

    q_grad, scales_grad = _dim1(given.grad)
    return partial(operands, q_grad.t(), scales_grad, *_dim1(given.A), given.offs)


def _rows_times_experts(rows: Quantized, experts: Quantized, offs: torch.Tensor) -> Call:
    from fp8tune_kernels.gemm.grouped_mxfp8 import operands

    return partial(operands, *rows, *experts, offs)


def _gemm(scales: Callable[[Operands], Call]) -> Callable[[Operands], Call]:
    """The GEMM on what a part named for scales makes."""

    def prepare(given: Operands) -> Call:
        from fp8tune_kernels.gemm.grouped_mxfp8 import multiply

        return partial(multiply, scales(given)(), given.offs)

    return prepare


MXFP8_GROUPED_MM = Operation(
    name="mxfp8-grouped-mm",
    recipe="mxfp8",
    ours=MXFP8,
    multiple=MULTIPLE,
    contenders={BF16: bf16, MXFP8: _ours, TORCHAO: _torchao},
    parts={
        "mxfp8-dim0 A": Part(("A",), lambda given: partial(_dim0, given.A)),
        "mxfp8-dim0 B_t": Part(("B_t",), lambda given: partial(_experts, given.B_t)),
        "scales out": Part(("A", "B_t"), _scales_out),
        "GEMM out": Part(("A", "B_t"), _gemm(_scales_out), "out"),
        "mxfp8-dim0 grad": Part(("grad",), lambda given: partial(_dim0, given.grad)),
        "mxfp8-dim1-3d B_t": Part(("B_t",), lambda given: partial(_dim1_3d, given.B_t)),
        "scales grad_A": Part(("grad", "B_t"), _scales_input_gradient),
        "GEMM grad_A": Part(("grad", "B_t"), _gemm(_scales_input_gradient), "grad_A"),
        "mxfp8-dim1 grad": Part(("grad",), lambda given: partial(_dim1, given.grad)),
        "mxfp8-dim1 A": Part(("A",), lambda given: partial(_dim1, given.A)),
        "scales grad_B": Part(("grad", "A"), _scales_weight_gradient),
        "GEMM grad_B": Part(("grad", "A"), _gemm(_scales_weight_gradient), "grad_B"),
    },
    native_arches=MXFP8_GEMM_ARCHES,
)
