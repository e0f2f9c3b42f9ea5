"""Gated activations of expert MLPs, in an arithmetic that gives the same bytes on every backend.

    swiglu     h = glu(gate) * up                                          glu(g) = g / (1 + exp(-g))
    gpt-oss    h = glu(min(gate, 7)) * (min(max(up, -7), 7) + 1)           glu(g) = g / (1 + exp(-1.702 * g))

    d_up   = dh * glu(gate)                 in gpt-oss 0 where up was outside of -7 to 7
    d_gate = dh * (up or up + 1) * slope(gate)             0 where gate was above 7

``glu`` and its derivative ``slope`` are functions of one bfloat16, and are rounded to bfloat16. They have 65,536 values
each, of which about 3,200 are not near 0, near a line, or the same as a neighbour's. No two backends have the same
``exp``. So before it is rounded, the value is multiplied by a constant near 1, chosen such that none of the 65,536 lies
near the middle between two numbers of bfloat16. Whatever ``exp`` and division a backend has, if they are right to two
units of float32, it rounds to the same number: tests compare all values, and an H100 gave the same. What follows are
products of float32, each rounded once.

Where ``exp`` would pass 2**126, glu and its derivative are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .. import interpreter

interpreter.install()

ACTIVATIONS = ("swiglu", "gpt-oss")
"""What ``ACTIVATION`` of the device functions is a place in."""

LAYOUTS = ("halves", "interleaved")
"""Of a matrix (M, 2N): all columns of the gate and then those of up, or gate and up in turn."""

LIMIT = 7.0
"""Of gate and up in gpt-oss."""

DIVISOR = (1.0000381469726562, 1.0000272989273071)
"""By activation: what ``1 + exp`` is multiplied by before it divides. Of float32 near ``1 / (1 - k * 2**-24)``, k below
4,096, those that leave the most room: 5.9 and 4.5 times the sum of all bounds on the error of each step."""

SLOPE = ((1.000014066696167, 1.0000522136688232), (1.0001697540283203, 1.702335238456726))
"""By activation: a and b of the derivative, ``s * (a + b * g * (exp * s))`` with ``s = 1 / (DIVISOR * (1 + exp))``.
With ``a = c * DIVISOR``, ``b = alpha * c * DIVISOR**2`` and c near 1, likewise: 2.2 and 1.2 times."""

EXPONENT = (1.4426950216293335, 2.4554669857025146)
"""By activation: alpha * log2(e), as float32."""


@triton.constexpr_function
def _constant(name: str, activation: int) -> float:
    """One of those above, where a kernel needs it: Triton 3.6 refuses the globals of a module."""
    named = {
        "exponent": (1.4426950216293335, 2.4554669857025146),
        "divisor": (1.0000381469726562, 1.0000272989273071),
        "slope": (1.000014066696167, 1.0001697540283203),
        "bend": (1.0000522136688232, 1.702335238456726),
    }
    return named[name][activation]


@triton.jit
def _exp_and_inverse(gate: tl.tensor, ACTIVATION: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """exp(-alpha * gate), no more than 2**126, and s: 0 where it would be more.

    On NVIDIA one instruction each: ``rcp.approx.ftz`` gives 0 for what is above 2**126.
    """
    power = gate * -_constant("exponent", ACTIVATION)
    divisor: tl.constexpr = _constant("divisor", ACTIVATION)
    if is_cuda():
        grown = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [power], dtype=tl.float32, is_pure=True, pack=1
        )
        whole = tl.fma(grown, divisor, divisor)
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [whole], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.minimum(grown, 8.507059173023462e37), inverse
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        is_above = power > 126.0
        grown = tl.where(is_above, 8.507059173023462e37, tl.exp2(power))
        return grown, tl.where(is_above, 0.0, 1.0 / ((grown + 1.0) * divisor))


@triton.jit
def _to_bfloat16(values: tl.tensor) -> tl.tensor:
    """Rounded to bfloat16, as float32. On NVIDIA two by one instruction."""
    if is_cuda():
        return tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505
        return values.to(tl.bfloat16).to(tl.float32)


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """h, float32, of gate and up: float32 that hold values of bfloat16."""
    if ACTIVATION == 1:
        gate = tl.where(gate > 7.0, 7.0, gate)  # comparisons keep a NaN
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    _, inverse = _exp_and_inverse(gate, ACTIVATION)
    return _to_bfloat16(gate * inverse) * up


@triton.jit
def gated_gradient(
    gate: tl.tensor, up: tl.tensor, dh: tl.tensor, ACTIVATION: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """d_gate, d_up and h, float32."""
    if ACTIVATION == 1:
        is_shut, is_bound = gate > 7.0, (up > 7.0) | (up < -7.0)
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    grown, inverse = _exp_and_inverse(gate, ACTIVATION)
    glu = _to_bfloat16(gate * inverse)
    bent = tl.fma(gate * (grown * inverse), _constant("bend", ACTIVATION), _constant("slope", ACTIVATION))
    slope = _to_bfloat16(inverse * bent)
    d_gate, d_up = dh * up * slope, dh * glu
    if ACTIVATION == 1:
        d_gate = tl.where(is_shut, 0.0, d_gate)
        d_up = tl.where(is_bound, 0.0, d_up)
    return d_gate, d_up, glu * up


def _reference_glu(gate: torch.Tensor, activation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """glu and its derivative of values of bfloat16: computed in float64, rounded to bfloat16, held in float32."""
    wide = gate.double()
    power = wide * -EXPONENT[activation]
    is_above = power > 126
    grown = torch.exp2(power).masked_fill(is_above, 2.0**126)
    inverse = (1 / (DIVISOR[activation] * (1 + grown))).masked_fill(is_above, 0)
    slope, bend = SLOPE[activation]
    return (wide * inverse).bfloat16().float(), (inverse * (slope + bend * wide * (grown * inverse))).bfloat16().float()


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
