"""The experts of a module as one operation, ``moe_layer``, where it knows what they compute."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ..moe.layer import moe_layer
from .once import layer_weights_of

__all__ = ["Gate", "gate_of", "multiply_layer"]

SILU = (nn.SiLU, SiLUActivation)

GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss"
"""Module whose gate clamps gate and up, which lie in turn."""


class Gate(NamedTuple):
    """Arguments of ``moe_layer`` that describe the gate of a module."""

    activation: str
    layout: str


def gate_of(module: Any) -> Gate | None:
    """Return the gate of a module of experts; None without one, and for one that ``moe_layer`` lacks."""
    origin = type(module)._apply_gate.__module__
    if origin == GPT_OSS and (module.alpha, module.limit) == (1.702, 7.0):
        return Gate("gpt-oss", "interleaved")
    is_swiglu = module.has_gate and origin == "transformers.integrations.moe" and isinstance(module.act_fn, SILU)
    return Gate("swiglu", "halves") if is_swiglu else None


def multiply_layer(module: Any, gate: Gate, x: Tensor, ids: Tensor, weights: Tensor, precision: str) -> Tensor:
    """Return the experts' output of tokens, (T, hidden), bfloat16."""
    w13, w2 = (layer_weights_of(module, name) for name in ("gate_up_proj", "down_proj"))
    b13, b2 = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return moe_layer(x.contiguous(), w13, w2, ids, weights, b13=b13, b2=b2, precision=precision, **gate._asdict())
