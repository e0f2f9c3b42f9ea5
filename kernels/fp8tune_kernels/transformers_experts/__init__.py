"""FP8 experts for models of transformers: an import registers them, one line switches a model.

    import fp8tune_kernels.transformers_experts
    model.set_experts_implementation("fp8tune")

    fp8tune         ``moe_layer`` in FP8; for gates that it lacks ``fp8_grouped_mm`` for each GEMM
    fp8tune-auto    the same in FP8 or bfloat16, whichever is expected to be faster

:func:`use_fp8_experts` sets one and returns the modules that multiply in FP8. :func:`weights_once` quantizes weights
once for all micro-batches of a step. :func:`register` adds an implementation with other options.
"""

from __future__ import annotations

from ..gemm.gathered_weights import quantize_after_all_gather
from .forward import Options
from .registry import fp8_modules, register, use_fp8_experts, weights_once, weights_once_per_step

__all__ = [
    "Options",
    "fp8_modules",
    "quantize_after_all_gather",
    "register",
    "use_fp8_experts",
    "weights_once",
    "weights_once_per_step",
]

register("fp8tune", Options())
register("fp8tune-auto", Options(precision="auto"))
