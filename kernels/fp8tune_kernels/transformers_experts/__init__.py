"""FP8 experts for models of transformers: an import registers them, one line switches a model.

    import fp8tune_kernels.transformers_experts
    model.set_experts_implementation("fp8tune")

    fp8tune             all GEMMs of the experts in FP8: ``fp8_grouped_mm``
    fp8tune-auto        ``precision="auto"``: bfloat16 where that was measured to be faster
    fp8tune-once        FP8, with weights that are quantized once for all micro-batches of a step
    fp8tune-auto-once   both

:func:`register` adds one with other options. See :mod:`.forward` for what is computed, :mod:`.held` for weights once.
"""

from __future__ import annotations

from fp8tune_kernels.transformers_experts.forward import Options
from fp8tune_kernels.transformers_experts.held import hold_weights
from fp8tune_kernels.transformers_experts.registry import register

__all__ = ["Options", "hold_weights", "register"]

for _name, _options in {
    "fp8tune": Options(),
    "fp8tune-auto": Options(precision="auto"),
    "fp8tune-once": Options(weights_once=True),
    "fp8tune-auto-once": Options(precision="auto", weights_once=True),
}.items():
    register(_name, _options)
