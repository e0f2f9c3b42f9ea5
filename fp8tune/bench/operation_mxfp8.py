"""``bench --op mxfp8-grouped-mm``: MXFP8, see :mod:`fp8tune_kernels.gemm.grouped_mxfp8`.

Between quantizing and each GEMM stands a part named for the scales: natively it lays them out in blocks, emulated it
multiplies them into the codes, to operands of a bfloat16 GEMM. Groups are padded to multiples of 32 rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import fp8tune_kernels as kernels  # imports torch and Triton when a kernel is first named
from fp8tune.bench import torchao_grouped
from fp8tune.bench.operation import (
    BF16,
    MXFP8,
    TORCHAO,
    Call,
    GroupedMM,
    Operands,
    Operation,
    Part,
    Quantized,
    bf16,
)
from fp8tune.errors import MachineError
from fp8tune_kernels.arches import MXFP8_GEMM_ARCHES

if TYPE_CHECKING:
    import torch

MULTIPLE = 32


def _mxfp8(given: Operands) -> GroupedMM:
    return partial(kernels.mxfp8_grouped_mm, pad_token_groups=given.pad)


def _torchao_mxfp8(given: Operands) -> GroupedMM:
    """With ``rceil`` scales, as ours; emulated in plain torch where ours is emulated too."""
    from fp8tune_kernels.gemm.grouped_mxfp8 import mxfp8_path

    if given.pad:
        raise MachineError(f"torchao takes only groups of a positive multiple of {MULTIPLE} rows")
    multiply = torchao_grouped.grouped_mm("mxfp8_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm")
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


def _dim0_of_experts(B_t: torch.Tensor) -> Quantized:
    """The weights with blocks along K, as the forward pass has them: all experts' rows in one matrix."""
    E, K, N = B_t.shape
    codes, scales = _dim0(B_t.mT.reshape(E * N, K))
    return codes.view(E, N, K).mT, scales.view(E, N, -1)


def _quantizing(quantized: Callable[[torch.Tensor], Quantized], operand: str) -> Part:
    return Part((operand,), lambda given: partial(quantized, getattr(given, operand)))


def _scales_out(given: Operands) -> Call:
    return _scales_of_rows(_dim0(given.A), _dim0_of_experts(given.B_t), given.offs)


def _scales_input_gradient(given: Operands) -> Call:
    return _scales_of_rows(_dim0(given.grad), _dim1_3d(given.B_t), given.offs)


def _scales_of_rows(rows: Quantized, experts: Quantized, offs: torch.Tensor) -> Call:
    from fp8tune_kernels.gemm.grouped_mxfp8 import operands

    return partial(operands, *rows, *experts, offs)


def _scales_weight_gradient(given: Operands) -> Call:
    from fp8tune_kernels.gemm.grouped_mxfp8 import operands

    q_grad, scales_grad = _dim1(given.grad)
    return partial(operands, q_grad.t(), scales_grad, *_dim1(given.A), given.offs)


def _scales_and_gemm(reads: tuple[str, ...], scales: Callable[[Operands], Call], result: str) -> dict[str, Part]:
    def gemm(given: Operands) -> Call:
        from fp8tune_kernels.gemm.grouped_mxfp8 import multiply

        return partial(multiply, scales(given)(), given.offs)

    return {f"scales {result}": Part(reads, scales), f"GEMM {result}": Part(reads, gemm, result)}


MXFP8_GROUPED_MM = Operation(
    name="mxfp8-grouped-mm",
    recipe="mxfp8",
    ours=MXFP8,
    multiple=MULTIPLE,
    pads=True,
    contenders={BF16: bf16, MXFP8: _mxfp8, TORCHAO: _torchao_mxfp8},
    parts={
        "mxfp8-dim0 A": _quantizing(_dim0, "A"),
        "mxfp8-dim0 B_t": _quantizing(_dim0_of_experts, "B_t"),
        **_scales_and_gemm(("A", "B_t"), _scales_out, "out"),
        "mxfp8-dim0 grad": _quantizing(_dim0, "grad"),
        "mxfp8-dim1-3d B_t": _quantizing(_dim1_3d, "B_t"),
        **_scales_and_gemm(("grad", "B_t"), _scales_input_gradient, "grad_A"),
        "mxfp8-dim1 grad": _quantizing(_dim1, "grad"),
        "mxfp8-dim1 A": _quantizing(_dim1, "A"),
        **_scales_and_gemm(("grad", "A"), _scales_weight_gradient, "grad_B"),
    },
    native_arches=MXFP8_GEMM_ARCHES,
)
