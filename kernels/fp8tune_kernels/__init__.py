"""FP8 quantization kernels for mixture-of-experts training, launched with the configs that fp8tune has exported.

``from fp8tune_kernels import quantize_colwise`` imports torch and triton; importing the package alone does not.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gemm.grouped_contraction import contract_rows as contract_rows
    from .gemm.grouped_mm import fp8_grouped_mm as fp8_grouped_mm
    from .gemm.grouped_mxfp8 import mxfp8_grouped_mm as mxfp8_grouped_mm
    from .gemm.grouped_rows import multiply_rows as multiply_rows
    from .gemm.quantized_weights import QuantizedWeights as QuantizedWeights
    from .gemm.quantized_weights import quantize_weights as quantize_weights
    from .moe.cast_transpose_3d import cast_and_transpose as cast_and_transpose
    from .moe.choose_experts import choose_experts as choose_experts
    from .moe.expert_parallel import ExpertGroup as ExpertGroup
    from .moe.expert_parallel import expert_parallel_moe as expert_parallel_moe
    from .moe.expert_sort import sort_by_expert as sort_by_expert
    from .moe.expert_weights import ExpertWeights as ExpertWeights
    from .moe.expert_weights import quantize_down as quantize_down
    from .moe.expert_weights import quantize_gate_up as quantize_gate_up
    from .moe.gather_sum import sum_rows_of_tokens as sum_rows_of_tokens
    from .moe.gathered_rows import multiply_gathered_rows as multiply_gathered_rows
    from .moe.gathered_transpose import transpose_gathered_codes as transpose_gathered_codes
    from .moe.layer import fp8_moe_mlp as fp8_moe_mlp
    from .moe.layer import moe_layer as moe_layer
    from .moe.shifted_transpose_3d import transpose_codes_to_one_scale as transpose_codes_to_one_scale
    from .pinning import PinError as PinError
    from .pinning import pin as pin
    from .pinning import pin_report as pin_report
    from .pinning import unpin as unpin
    from .quantize.colwise import quantize_colwise as quantize_colwise
    from .quantize.colwise_3d import quantize_colwise_3d as quantize_colwise_3d
    from .quantize.colwise_dual import quantize_colwise_dual as quantize_colwise_dual
    from .quantize.colwise_transpose_3d import quantize_colwise_transpose_3d as quantize_colwise_transpose_3d
    from .quantize.mxfp8_dim0 import quantize_mxfp8_dim0 as quantize_mxfp8_dim0
    from .quantize.mxfp8_dim1 import quantize_mxfp8_dim1 as quantize_mxfp8_dim1
    from .quantize.mxfp8_dim1_3d import quantize_mxfp8_dim1_3d as quantize_mxfp8_dim1_3d
    from .quantize.mxfp8_dim1_3d_via_2d import quantize_mxfp8_dim1_3d_via_2d as quantize_mxfp8_dim1_3d_via_2d
    from .quantize.rowwise import quantize_rowwise as quantize_rowwise
    from .quantize.rowwise_2d import quantize_rowwise_2d as quantize_rowwise_2d
    from .quantize.rowwise_colwise import quantize_rowwise_colwise as quantize_rowwise_colwise
    from .quantize.rowwise_factored import quantize_rowwise_factored as quantize_rowwise_factored
    from .quantize.swiglu_gradient import quantize_swiglu_gradient as quantize_swiglu_gradient
    from .quantize.swiglu_rowwise import quantize_swiglu_rowwise as quantize_swiglu_rowwise
    from .quantize.transpose_3d_atomic import quantize_transpose_3d_atomic as quantize_transpose_3d_atomic
    from .quantize.transpose_3d_reduction import quantize_transpose_3d_reduction as quantize_transpose_3d_reduction
    from .quantize.transposed_codes import transpose_codes as transpose_codes
    from .quantize.transposed_codes_3d import transpose_codes_3d as transpose_codes_3d

_QUANTIZERS = (
    "colwise",
    "colwise_3d",
    "colwise_dual",
    "colwise_transpose_3d",
    "mxfp8_dim0",
    "mxfp8_dim1",
    "mxfp8_dim1_3d",
    "mxfp8_dim1_3d_via_2d",
    "rowwise",
    "rowwise_2d",
    "rowwise_colwise",
    "rowwise_factored",
    "swiglu_gradient",
    "swiglu_rowwise",
    "transpose_3d_atomic",
    "transpose_3d_reduction",
)

_MODULES = {
    **{f"quantize_{name}": f"quantize.{name}" for name in _QUANTIZERS},
    **dict.fromkeys(("PinError", "pin", "pin_report", "unpin"), "pinning"),
    "cast_and_transpose": "moe.cast_transpose_3d",
    "choose_experts": "moe.choose_experts",
    "contract_rows": "gemm.grouped_contraction",
    "expert_parallel_moe": "moe.expert_parallel",
    "ExpertGroup": "moe.expert_parallel",
    "ExpertWeights": "moe.expert_weights",
    "fp8_grouped_mm": "gemm.grouped_mm",
    "fp8_moe_mlp": "moe.layer",
    "moe_layer": "moe.layer",
    "multiply_gathered_rows": "moe.gathered_rows",
    "multiply_rows": "gemm.grouped_rows",
    "mxfp8_grouped_mm": "gemm.grouped_mxfp8",
    "quantize_down": "moe.expert_weights",
    "quantize_gate_up": "moe.expert_weights",
    "quantize_weights": "gemm.quantized_weights",
    "QuantizedWeights": "gemm.quantized_weights",
    "sort_by_expert": "moe.expert_sort",
    "sum_rows_of_tokens": "moe.gather_sum",
    "transpose_codes": "quantize.transposed_codes",
    "transpose_codes_3d": "quantize.transposed_codes_3d",
    "transpose_codes_to_one_scale": "moe.shifted_transpose_3d",
    "transpose_gathered_codes": "moe.gathered_transpose",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("FP8TUNE_PIN"):  # fp8tune_kernels.pth imports this package at the start of a process that has it
    from . import imports

    imports.after_import("triton", lambda _: importlib.import_module(f"{__name__}.pinning").pin_from_environment())
