"""Gated activations of expert MLPs, in an arithmetic that gives the same bytes on every backend.

    swiglu     h = glu(gate) * up                                          glu(g) = g / (1 + exp(-g))
    gpt-oss    h = glu(min(gate, 7)) * (min(max(up, -7), 7) + 1)           glu(g) = g / (1 + exp(-1.702 * g))

    d_up   = dh * glu(gate)                 in gpt-oss 0 where up was outside of -7 to 7
    d_gate = dh * (up or up + 1) * slope(gate)             0 where gate was above 7

``glu`` and its derivative ``slope`` are functions of one bfloat16, and are rounded to bfloat16. They have 65,536 values
each, of which about 3,200 are not near 0, near a line, or the same as a neighbour's. No two backends have the same
``exp``. So before it is rounded, the value is multiplied by a constant just below 1 (:data:`SHRINK`), chosen such that
none of the 65,536 lies near the middle between two numbers of bfloat16. Whatever ``exp`` and division a backend has, if
they are right to two units of float32, it rounds to the same number: tests compare all values. What follows are
products of float32, each rounded once.

Where ``exp`` would pass 2**120, glu and its derivative are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8tune_kernels import interpreter

__all__ = ["ACTIVATIONS", "LAYOUTS", "gated", "gated_gradient", "reference_gated", "reference_gated_gradient"]

interpreter.install()

ACTIVATIONS = ("swiglu", "gpt-oss")
"""What ``ACTIVATION`` of the device functions is a place in."""

LAYOUTS = ("halves", "interleaved")
"""Of a matrix (M, 2N): all columns of the gate and then those of up, or gate and up in turn."""

ALPHA = (1.0, 1.702)
"""Of the gate, by activation (transformers, ``modeling_gpt_oss.py``)."""

LIMIT = 7.0
"""Of gate and up in gpt-oss."""

SHRINK = ((1 - 646 * 2**-24, 1 - 408 * 2**-24), (1 - 1748 * 2**-24, 1 - 197 * 2**-24))
"""By activation: of glu and of its derivative. Of multiples of 2**-24 below 2**-12, those that leave the most room: 5.1
and 2.1 times, 3.6 and 0.8 times the sum of all bounds on the error of each step."""

_EXPONENTS = tuple(float(torch.tensor(alpha * 1.4426950408889634)) for alpha in ALPHA)
"""alpha * log2(e), as float32."""


@triton.constexpr_function
def _alpha(activation: int) -> float:
    return 1.0 if activation == 0 else 1.702


@triton.constexpr_function
def _exponent(activation: int) -> float:
    return 1.4426950216293335 if activation == 0 else 2.4554669857025146


@triton.constexpr_function
def _shrink(activation: int) -> float:
    return 1 - 646 * 2**-24 if activation == 0 else 1 - 1748 * 2**-24


@triton.constexpr_function
def _shrink_slope(activation: int) -> float:
    return 1 - 408 * 2**-24 if activation == 0 else 1 - 197 * 2**-24


@triton.jit
def _sigmoid(gate: tl.tensor, ACTIVATION: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """2**-y, 1 / (1 + 2**-y) and whether both count as infinite and 0."""
    power = gate * -_exponent(ACTIVATION)
    grown = tl.exp2(power)
    return grown, 1.0 / (1.0 + grown), power > 120.0


@triton.jit
def _to_bfloat16(values: tl.tensor) -> tl.tensor:
    return values.to(tl.bfloat16).to(tl.float32)


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """h, float32, of gate and up: float32 that hold values of bfloat16."""
    if ACTIVATION == 1:
        gate = tl.where(gate > 7.0, 7.0, gate)  # comparisons keep a NaN
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    _, sigmoid, is_zero = _sigmoid(gate, ACTIVATION)
    glu = _to_bfloat16(gate * tl.where(is_zero, 0.0, sigmoid) * _shrink(ACTIVATION))
    return glu * up


@triton.jit
def gated_gradient(
    gate: tl.tensor, up: tl.tensor, dh: tl.tensor, ACTIVATION: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """d_gate, d_up and h, float32."""
    if ACTIVATION == 1:
        is_shut, is_bound = gate > 7.0, (up > 7.0) | (up < -7.0)
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    grown, sigmoid, is_zero = _sigmoid(gate, ACTIVATION)
    glu = _to_bfloat16(gate * tl.where(is_zero, 0.0, sigmoid) * _shrink(ACTIVATION))
    slope = sigmoid * (1.0 + _alpha(ACTIVATION) * gate * (grown * sigmoid))
    slope = _to_bfloat16(tl.where(is_zero, 0.0, slope * _shrink_slope(ACTIVATION)))
    d_gate, d_up = dh * up * slope, dh * glu
    if ACTIVATION == 1:
        d_gate = tl.where(is_shut, 0.0, d_gate)
        d_up = tl.where(is_bound, 0.0, d_up)
    return d_gate, d_up, glu * up


def _reference_glu(gate: torch.Tensor, activation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """glu and its derivative of values of bfloat16: computed in float64, rounded to bfloat16, held in float32."""
    alpha, exponent = float(torch.tensor(ALPHA[activation])), _EXPONENTS[activation]
    wide = gate.double()
    power = wide * -exponent
    grown = torch.exp2(power)
    sigmoid = 1 / (1 + grown)
    is_zero = power > 120
    glu = wide * sigmoid.masked_fill(is_zero, 0) * SHRINK[activation][0]
    slope = (sigmoid * (1 + alpha * wide * (grown * sigmoid)) * SHRINK[activation][1]).masked_fill(is_zero, 0)
    return glu.bfloat16().float(), slope.bfloat16().float()


def _clamped(gate: torch.Tensor, up: torch.Tensor, activation: int) -> tuple[torch.Tensor, torch.Tensor]:
    if ACTIVATIONS[activation] == "gpt-oss":
        return gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
    return gate, up


def reference_gated(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """:func:`gated` in torch."""
    gate, up = _clamped(gate.float(), up.float(), activation)
    return _reference_glu(gate, activation)[0] * up


def reference_gated_gradient(
    gate: torch.Tensor, up: torch.Tensor, dh: torch.Tensor, activation: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`gated_gradient` in torch."""
    gate, up, dh = gate.float(), up.float(), dh.float()
    is_shut, is_bound = gate > LIMIT, (up > LIMIT) | (up < -LIMIT)
    gate, up = _clamped(gate, up, activation)
    glu, slope = _reference_glu(gate, activation)
    d_gate, d_up = dh * up * slope, dh * glu
    if ACTIVATIONS[activation] == "gpt-oss":
        d_gate, d_up = d_gate.masked_fill(is_shut, 0), d_up.masked_fill(is_bound, 0)
    return d_gate, d_up, glu * up
