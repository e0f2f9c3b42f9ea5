"""FP8 quantization kernels for mixture-of-experts training, launched with the configs that fp8tune has exported.

``from fp8tune_kernels import quantize_colwise`` imports torch and triton; importing the package alone does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gemm.grouped_contraction import contract_rows
    from .gemm.grouped_mm import fp8_grouped_mm
    from .gemm.grouped_mxfp8 import mxfp8_grouped_mm
    from .gemm.grouped_rows import multiply_rows
    from .gemm.quantized_weights import QuantizedWeights, quantize_weights
    from .moe.cast_transpose_3d import cast_and_transpose
    from .moe.choose_experts import choose_experts
    from .moe.expert_sort import sort_by_expert
    from .moe.expert_weights import ExpertWeights, quantize_down, quantize_gate_up
    from .moe.gather_sum import sum_rows_of_tokens
    from .moe.gathered_rows import multiply_gathered_rows
    from .moe.gathered_transpose import transpose_gathered_codes
    from .moe.layer import fp8_moe_mlp, moe_layer
    from .moe.shifted_transpose_3d import transpose_codes_to_one_scale
    from .quantize.colwise import quantize_colwise
    from .quantize.colwise_3d import quantize_colwise_3d
    from .quantize.colwise_dual import quantize_colwise_dual
    from .quantize.colwise_transpose_3d import quantize_colwise_transpose_3d
    from .quantize.mxfp8_dim0 import quantize_mxfp8_dim0
    from .quantize.mxfp8_dim1 import quantize_mxfp8_dim1
    from .quantize.mxfp8_dim1_3d import quantize_mxfp8_dim1_3d
    from .quantize.mxfp8_dim1_3d_via_2d import quantize_mxfp8_dim1_3d_via_2d
    from .quantize.rowwise import quantize_rowwise
    from .quantize.rowwise_2d import quantize_rowwise_2d
    from .quantize.rowwise_colwise import quantize_rowwise_colwise
    from .quantize.rowwise_factored import quantize_rowwise_factored
    from .quantize.swiglu_gradient import quantize_swiglu_gradient
    from .quantize.swiglu_rowwise import quantize_swiglu_rowwise
    from .quantize.transpose_3d_atomic import quantize_transpose_3d_atomic
    from .quantize.transpose_3d_reduction import quantize_transpose_3d_reduction
    from .quantize.transposed_codes import transpose_codes
    from .quantize.transposed_codes_3d import transpose_codes_3d

__all__ = [
    "ExpertWeights",
    "QuantizedWeights",
    "cast_and_transpose",
    "choose_experts",
    "contract_rows",
    "fp8_grouped_mm",
    "fp8_moe_mlp",
    "moe_layer",
    "multiply_gathered_rows",
    "multiply_rows",
    "mxfp8_grouped_mm",
    "quantize_colwise",
    "quantize_colwise_3d",
    "quantize_colwise_dual",
    "quantize_colwise_transpose_3d",
    "quantize_down",
    "quantize_gate_up",
    "quantize_mxfp8_dim0",
    "quantize_mxfp8_dim1",
    "quantize_mxfp8_dim1_3d",
    "quantize_mxfp8_dim1_3d_via_2d",
    "quantize_rowwise",
    "quantize_rowwise_2d",
    "quantize_rowwise_colwise",
    "quantize_rowwise_factored",
    "quantize_swiglu_gradient",
    "quantize_swiglu_rowwise",
    "quantize_transpose_3d_atomic",
    "quantize_transpose_3d_reduction",
    "quantize_weights",
    "sort_by_expert",
    "sum_rows_of_tokens",
    "transpose_codes",
    "transpose_codes_3d",
    "transpose_codes_to_one_scale",
    "transpose_gathered_codes",
]

_MODULES = {
    **{name: f"quantize.{name.removeprefix('quantize_')}" for name in __all__},
    "ExpertWeights": "moe.expert_weights",
    "choose_experts": "moe.choose_experts",
    "cast_and_transpose": "moe.cast_transpose_3d",
    "contract_rows": "gemm.grouped_contraction",
    "fp8_grouped_mm": "gemm.grouped_mm",
    "fp8_moe_mlp": "moe.layer",
    "moe_layer": "moe.layer",
    "multiply_gathered_rows": "moe.gathered_rows",
    "multiply_rows": "gemm.grouped_rows",
    "mxfp8_grouped_mm": "gemm.grouped_mxfp8",
    "QuantizedWeights": "gemm.quantized_weights",
    "quantize_down": "moe.expert_weights",
    "quantize_gate_up": "moe.expert_weights",
    "quantize_weights": "gemm.quantized_weights",
    "sort_by_expert": "moe.expert_sort",
    "sum_rows_of_tokens": "moe.gather_sum",
    "transpose_codes": "quantize.transposed_codes",
    "transpose_codes_3d": "quantize.transposed_codes_3d",
    "transpose_codes_to_one_scale": "moe.shifted_transpose_3d",
    "transpose_gathered_codes": "moe.gathered_transpose",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
