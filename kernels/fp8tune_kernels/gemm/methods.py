"""Which method multiplies in each pass of a step: what the table of the running arch says of a layer's shape.

A precision is a flag in the lookup key: with ``FP8_ONLY`` a pass picks among the methods that multiply in FP8, with
``ANY`` among all, and with ``ANY_ONCE`` among all where the weights were quantized before, so that their cast costs
nothing. The weight gradient does not read the weights: of it the table has ``FP8_ONLY`` and ``ANY``.

A pass takes the method of its shape, or of the nearest shape that was measured with the same precision. Where the
table has none, ``FP8_ONLY`` is our FP8 GEMM; the others promise to be no slower than bf16, which takes a measurement:
they are :data:`~fp8tune_kernels.gemm.passes.BF16_TORCH`.
"""

from __future__ import annotations

import torch

from fp8tune_kernels.gemm import grouped_mm_forward, grouped_mm_input_gradient, grouped_mm_weight_gradient
from fp8tune_kernels.gemm.grouped_mm_passes import ANY, ANY_ONCE, FP8_ONLY
from fp8tune_kernels.gemm.passes import BF16_TORCH, FP8
from fp8tune_kernels.runtime.lookup import measured_config
from fp8tune_kernels.spec import bucket

__all__ = ["ANY", "ANY_ONCE", "FP8_ONLY", "PASSES", "method_for"]

PASSES = ("forward", "input-gradient", "weight-gradient")

_SPECS = {
    "forward": grouped_mm_forward.SPEC,
    "input-gradient": grouped_mm_input_gradient.SPEC,
    "weight-gradient": grouped_mm_weight_gradient.SPEC,
}


def method_for(name: str, M: int, N: int, K: int, G: int, precision: int, device: torch.device) -> int:
    """The method (see :mod:`.passes`) of one of :data:`PASSES` on a layer: K inputs, N outputs, G experts, M rows."""
    if precision == ANY_ONCE and name == "weight-gradient":
        precision = ANY
    spec, key = _SPECS[name], (bucket(M), N, K, G, precision)
    found = measured_config(spec, key, device)
    if found is None:
        return FP8 if precision == FP8_ONLY else BF16_TORCH
    return found["METHOD"]
