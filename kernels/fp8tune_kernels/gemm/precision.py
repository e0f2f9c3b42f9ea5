"""The rule of ``precision="auto"``: FP8 or bfloat16, from the shapes of a layer or of a grouped product.

For M rows (tokens times experts per token), E experts and weights of K x N elements per expert, the rule expects

    a step in bfloat16 to take   bf16.per_product * M*K*N + bf16.per_weight * E*K*N
    FP8 to save                  saved.per_product * M*K*N + saved.per_input * M*K - saved.per_weight * E*K*N

microseconds on the GPU: products are faster, and each weight is read, cast and transposed before. An FP8 step has more
launches, so that the host needs at least ``launch_us`` for it. FP8 is expected to pay if the saving is positive and the
step in bfloat16 takes longer than those launches. Both hold from some number of rows on, which :func:`least_fp8_rows`
returns. Nothing here reads a tensor or waits for a device, and ``torch.compile`` guards on one comparison.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fp8tune_kernels.runtime.lookup import running_arch

__all__ = ["LAYER", "PRECISIONS", "PRODUCT", "Costs", "Rule", "is_fp8_layer", "is_fp8_product", "least_fp8_rows"]

PRECISIONS = ("fp8", "bf16", "auto")


class Costs(NamedTuple):
    """Microseconds for each 10**9 products of a row and a weight, 10**6 elements of rows, and 10**6 weights."""

    per_product: float
    per_input: float
    per_weight: float

    def us(self, rows: float, inputs: int, outputs: int, experts: int) -> float:
        """Return microseconds of a step."""
        per_row, fixed = self.per_row_us(inputs, outputs), self.per_weight * 1e-6 * experts * inputs * outputs
        return rows * per_row + fixed

    def per_row_us(self, inputs: int, outputs: int) -> float:
        """Return microseconds that a row adds to a step."""
        return self.per_product * 1e-9 * inputs * outputs + self.per_input * 1e-6 * inputs


class Rule(NamedTuple):
    """Fitted figures of one kind of step."""

    bf16: Costs
    saved: Costs
    launch_us: float


LAYER = {"sm_90": Rule(Costs(26.0, 0.0, 7.0), Costs(12.06, 0.0, -6.09), 2800.0)}
PRODUCT = {"sm_90": Rule(Costs(13.0, 0.0, 3.0), Costs(5.94, -2.63, -4.81), 950.0)}
"""Arch -> rule, of ``moe_layer`` and of ``fp8_grouped_mm``."""


def is_fp8_layer(tokens: int, hidden: int, inner: int, experts: int, top_k: int, device: torch.device) -> bool:
    """Decide for a layer of gate, up and down on a device."""
    return tokens * top_k >= least_fp8_rows(LAYER.get(_arch(device)), hidden, inner, experts)


def is_fp8_product(rows: int, inputs: int, outputs: int, experts: int, device: torch.device) -> bool:
    """Decide for a grouped product and its gradients on a device."""
    return rows >= least_fp8_rows(PRODUCT.get(_arch(device)), inputs, outputs, experts)


def least_fp8_rows(rule: Rule | None, inputs: int, outputs: int, experts: int) -> int:
    """Return the number of rows from which on FP8 is expected to pay; 2**62 for never, and without a rule."""
    never = 2**62
    if rule is None:
        return never
    saved_us, bf16_us = rule.saved.per_row_us(inputs, outputs), rule.bf16.per_row_us(inputs, outputs)
    if saved_us <= 0:
        return never
    by_casts = -rule.saved.us(0, inputs, outputs, experts) / saved_us
    by_launches = (rule.launch_us - rule.bf16.us(0, inputs, outputs, experts)) / bf16_us
    return max(0, math.ceil(max(by_casts, by_launches)))


@torch.compiler.assume_constant_result
def _arch(device: torch.device) -> str:
    return running_arch(device)
