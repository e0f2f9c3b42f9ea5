"""The rule of ``precision="auto"``: FP8 or bfloat16, from the shapes of a layer or of a grouped product.

For M rows (tokens times experts per token), E experts and weights of K x N elements per expert, the rule estimates two
figures in microseconds, each as ``per_product * M*K*N + per_input * M*K + per_weight * E*K*N``:

    bf16     GPU time of a step in bfloat16, forward and backward
    saved    GPU time that FP8 saves: its products take less time, but each weight is cast and transposed first

An FP8 step has more launches, for which the host needs about ``launch_us``. FP8 is expected to pay if it saves time and
the step in bfloat16 takes longer than those launches. Both hold from some number of rows on: :func:`least_fp8_rows`.

Nothing here reads a tensor or waits for a device, and ``torch.compile`` guards on one comparison.

``python -m benchmarks.layer_precision`` fits the figures. 22 layers and 22 products were held back
from the fit on an H100: it took the faster precision for 20 and 22, and kept 0.97 of its speed at least.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..runtime.lookup import device_name, running_arch
from .warp_specialized import is_requested

PRECISIONS = ("fp8", "bf16", "auto")

NEVER = 2**62
"""More rows than there are."""


class Costs(NamedTuple):
    """Microseconds per 10**9 products of a row and a weight, 10**6 elements of rows, and 10**6 weights."""

    per_product: float
    per_input: float
    per_weight: float

    def us(self, rows: float, inputs: int, outputs: int, experts: int) -> float:
        """Return the estimate for a step."""
        return rows * self.per_row_us(inputs, outputs) + self.fixed_us(inputs, outputs, experts)

    def per_row_us(self, inputs: int, outputs: int) -> float:
        """Return the part of each row."""
        return (self.per_product * 1e-3 * outputs + self.per_input) * 1e-6 * inputs

    def fixed_us(self, inputs: int, outputs: int, experts: int) -> float:
        """Return the part that is the same for any number of rows."""
        return self.per_weight * 1e-6 * experts * inputs * outputs


class Rule(NamedTuple):
    """Fitted figures of one kind of step."""

    bf16: Costs
    saved: Costs
    launch_us: float


LAYER = {
    "sm_90": Rule(Costs(23.103, 11.092, 5.875), Costs(8.633, 2.417, -4.82), 1420.0),
    # the eight steps of docs/results/data/moe-layer-gluon-h200.csv; launches as on an H100
    "NVIDIA H200": Rule(Costs(25.936, 9.332, 4.023), Costs(11.012, 5.679, -3.206), 1420.0),
}
"""Arch, or GPU that runs Gluon kernels -> rule of ``moe_layer``. K is the hidden size and N that of an expert,
which has three matrices."""

PRODUCT = {"sm_90": Rule(Costs(6.426, 2.233, 1.458), Costs(2.692, -2.695, -2.296), 593.0)}
"""Arch -> rule of ``fp8_grouped_mm``."""


def is_fp8_layer(tokens: int, hidden: int, inner: int, experts: int, top_k: int, device: torch.device) -> bool:
    """Return True if a layer of gate, up and down is expected to be faster in FP8."""
    return tokens * top_k >= least_fp8_rows(LAYER.get(_gpu_or_arch(device)), hidden, inner, experts)


def is_fp8_product(rows: int, inputs: int, outputs: int, experts: int, device: torch.device) -> bool:
    """Return True if a grouped product with its gradients is expected to be faster in FP8."""
    return rows >= least_fp8_rows(PRODUCT.get(_arch(device)), inputs, outputs, experts)


def least_fp8_rows(rule: Rule | None, inputs: int, outputs: int, experts: int) -> int:
    """Return the number of rows from which on FP8 is expected to pay; NEVER without a rule, as on other arches."""
    if rule is None:
        return NEVER
    bf16, saved = rule.bf16, rule.saved
    saved_us = saved.per_row_us(inputs, outputs)
    if saved_us <= 0:
        return NEVER
    by_casts = -saved.fixed_us(inputs, outputs, experts) / saved_us
    by_launches = (rule.launch_us - bf16.fixed_us(inputs, outputs, experts)) / bf16.per_row_us(inputs, outputs)
    return math.ceil(max(by_casts, by_launches))


def _arch(device: torch.device) -> str:
    return running_arch(device)


def _gpu_or_arch(device: torch.device) -> str:
    name = device_name(device)
    return name if name in LAYER and is_requested(device) else running_arch(device)


# As torch.compiler.assume_constant_result does it, which takes a second to import.
for _function in (_arch, _gpu_or_arch):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
