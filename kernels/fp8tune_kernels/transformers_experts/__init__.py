"""FP8 experts for models of transformers: an import registers them, one line switches a model.

    import fp8tune_kernels.transformers_experts
    model.set_experts_implementation("fp8tune")

    fp8tune             all GEMMs of the experts in FP8: ``fp8_grouped_mm``
    fp8tune-auto        ``precision="auto"``: bfloat16 where that was measured to be faster
    fp8tune-folded      ``recipe="folded"``: the operands are cast once; not for weights that lie as (E, K, N)
    fp8tune-mlp         the layer as one operation, ``moe_layer``, on tokens as they are

:func:`use_fp8_experts` sets one and returns the modules that multiply in FP8. :func:`weights_once` quantizes weights
once for all micro-batches of a step. :func:`register` adds an implementation with other options.
"""

from __future__ import annotations

from fp8tune_kernels.gemm.gathered_weights import quantize_after_all_gather
from fp8tune_kernels.transformers_experts.forward import Options
from fp8tune_kernels.transformers_experts.registry import fp8_modules, register, use_fp8_experts, weights_once
from fp8tune_kernels.transformers_experts.trainer import weights_once_per_step

__all__ = [
    "Options",
    "fp8_modules",
    "quantize_after_all_gather",
    "register",
    "use_fp8_experts",
    "weights_once",
    "weights_once_per_step",
]

for _name, _options in {
    "fp8tune": Options(),
    "fp8tune-auto": Options(precision="auto"),
    "fp8tune-folded": Options(recipe="folded"),
    "fp8tune-mlp": Options(is_one_operation=True),
}.items():
    register(_name, _options)
