"""Which method multiplies in each pass of a step: what the table of the running arch says of a layer's shape.

A precision is a flag in the lookup key: with ``FP8_ONLY`` a pass picks among the methods that multiply in FP8, with
``ANY`` among all, and with ``ANY_ONCE`` among all where the weights were quantized before, so that their cast costs
nothing. The weight gradient does not read the weights: of it the table has ``FP8_ONLY`` and ``ANY``.

``FP8_ONLY`` takes the method of the shape, or of the nearest shape; where the table has none, our FP8 GEMM.

The others promise to be no slower than bf16, which takes a measurement. They take the method of the shape. A shape that
was not measured takes that of the nearest one if it is FP8 and had at most twice the rows a group: against products,
casts of weights weigh G / M and those of rows 1 / N. Any other is :data:`~fp8tune_kernels.gemm.passes.BF16_TORCH`. On
an H200 55 of 74 passes that were not measured take FP8 so; no step of their 28 layers was slower than bf16.
"""

from __future__ import annotations

import torch

from fp8tune_kernels.gemm import grouped_mm_forward, grouped_mm_input_gradient, grouped_mm_weight_gradient
from fp8tune_kernels.gemm.grouped_mm_passes import ANY, ANY_ONCE, FP8_ONLY
from fp8tune_kernels.gemm.passes import BF16_TORCH, FP8, FP8_TORCH
from fp8tune_kernels.runtime.lookup import caches, config_for, nearest_row
from fp8tune_kernels.spec import KernelSpec, bucket

__all__ = ["ANY", "ANY_ONCE", "FP8_ONLY", "PASSES", "method_for"]

PASSES = ("forward", "input-gradient", "weight-gradient")

_SPECS = {
    "forward": grouped_mm_forward.SPEC,
    "input-gradient": grouped_mm_input_gradient.SPEC,
    "weight-gradient": grouped_mm_weight_gradient.SPEC,
}

BF16_ONLY = 3
"""A precision: bfloat16."""

BF16_METHODS = {"forward": BF16_TORCH, "input-gradient": BF16_TORCH, "weight-gradient": BF16_TORCH}

_found: dict[tuple[str, tuple[int, ...], torch.device], int] = {}

caches.append(_found.clear)


def method_for(name: str, M: int, N: int, K: int, G: int, precision: int, device: torch.device) -> int:
    """The method (see :mod:`.passes`) of one of :data:`PASSES` on a layer: K inputs, N outputs, G experts, M rows."""
    if precision == BF16_ONLY:
        return BF16_METHODS[name]
    if precision == ANY_ONCE and name == "weight-gradient":
        precision = ANY
    key = bucket(M), N, K, G, precision
    method = _found.get((name, key, device))
    if method is None:
        method = _method(_SPECS[name], key, device)
        if device.type != "meta":  # which arch is compiled for changes
            _found[name, key, device] = method
    return method


def _method(spec: KernelSpec, key: tuple[int, ...], device: torch.device) -> int:
    if key[-1] == FP8_ONLY:
        method = config_for(spec, key, device)["METHOD"]
        return method if method in (FP8, FP8_TORCH) else FP8  # the fallback row is of any precision
    row = nearest_row(spec, key, device)
    if row is None:
        return BF16_TORCH
    measured, config = row
    rows_a_group, known = key[0] * measured[3], measured[0] * key[3]  # both times both numbers of groups
    if measured == key or (config["METHOD"] in (FP8, FP8_TORCH) and 2 * rows_a_group >= known):
        return config["METHOD"]
    return BF16_TORCH
