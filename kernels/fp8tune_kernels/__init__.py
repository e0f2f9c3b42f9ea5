"""FP8 quantization kernels for mixture-of-experts training, launched with the configs that fp8tune has exported.

``from fp8tune_kernels import quantize_colwise`` imports torch and triton; importing the package alone does not.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from .catalog import GATED, QUANTIZERS

if TYPE_CHECKING:  # kernels themselves are operators of torch, which have no types
    from .gemm.grouped_mm import fp8_grouped_mm as fp8_grouped_mm
    from .gemm.grouped_mxfp8 import mxfp8_grouped_mm as mxfp8_grouped_mm
    from .gemm.quantized_weights import QuantizedWeights as QuantizedWeights
    from .gemm.quantized_weights import quantize_weights as quantize_weights
    from .moe.choose_experts import choose_experts as choose_experts
    from .moe.expert_parallel import ExpertGroup as ExpertGroup
    from .moe.expert_parallel import expert_parallel_moe as expert_parallel_moe
    from .moe.expert_weights import ExpertWeights as ExpertWeights
    from .moe.expert_weights import quantize_down as quantize_down
    from .moe.expert_weights import quantize_gate_up as quantize_gate_up
    from .moe.layer import fp8_moe_mlp as fp8_moe_mlp
    from .moe.layer import moe_layer as moe_layer
    from .pinning import PinError as PinError
    from .pinning import pin as pin
    from .pinning import pin_report as pin_report
    from .pinning import unpin as unpin

_MODULES = {
    **{
        f"quantize_{name}": f"quantize.{name}"
        for name in (kernel.replace("-", "_") for kernel in (*QUANTIZERS, *GATED))
    },
    **dict.fromkeys(("PinError", "pin", "pin_report", "unpin"), "pinning"),
    **dict.fromkeys(("fp8_moe_mlp", "moe_layer"), "moe.layer"),
    **dict.fromkeys(("ExpertWeights", "quantize_down", "quantize_gate_up"), "moe.expert_weights"),
    **dict.fromkeys(("QuantizedWeights", "quantize_weights"), "gemm.quantized_weights"),
    "cast_and_transpose": "moe.cast_transpose_3d",
    "choose_experts": "moe.choose_experts",
    "contract_rows": "gemm.grouped_contraction",
    "contract_rows_hopper": "gemm.grouped_contraction_hopper",
    **dict.fromkeys(("ExpertGroup", "expert_parallel_moe"), "moe.expert_parallel"),
    "fp8_grouped_mm": "gemm.grouped_mm",
    "multiply_gathered_rows": "moe.gathered_rows",
    "multiply_rows": "gemm.grouped_rows",
    "multiply_rows_hopper": "gemm.grouped_rows_hopper",
    "mxfp8_grouped_mm": "gemm.grouped_mxfp8",
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
