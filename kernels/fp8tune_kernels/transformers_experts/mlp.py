"""The experts as one operation: ``moe_layer``, and ``fp8_moe_mlp`` for activations that it lacks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from fp8tune_kernels.gemm.moe_mlp import fp8_moe_mlp
from fp8tune_kernels.moe.layer import moe_layer
from fp8tune_kernels.transformers_experts.once import layer_weights_of, weights_of

__all__ = ["Gate", "gate_of", "multiply_layer", "multiply_mlp"]

SILU = (nn.SiLU, SiLUActivation)

GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss"
"""Module whose gate clamps gate and up, which lie in turn."""


class Gate(NamedTuple):
    """Arguments of ``moe_layer`` that describe the gate of a module."""

    activation: str
    layout: str


def gate_of(module: Any) -> Gate | None:
    """Return the gate of a module of experts; None for an activation that ``moe_layer`` lacks.

    Raises ValueError for a module without a gate, or with one of its own that is not known here.
    """
    origin = type(module)._apply_gate.__module__
    if origin == GPT_OSS and (module.alpha, module.limit) == (1.702, 7.0):
        return Gate("gpt-oss", "interleaved")
    if not module.has_gate or origin != "transformers.integrations.moe":
        name = type(module).__name__
        raise ValueError(f"{name} has no gate, or one of its own, that one operation does not know: use 'fp8tune'")
    return Gate("swiglu", "halves") if isinstance(module.act_fn, SILU) else None


def multiply_layer(module: Any, gate: Gate, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the experts' output of tokens, (T, hidden), bfloat16."""
    w13, w2 = (layer_weights_of(module, name) for name in ("gate_up_proj", "down_proj"))
    b13, b2 = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return moe_layer(x.contiguous(), w13, w2, ids, weights, b13=b13, b2=b2, **gate._asdict())


def multiply_mlp(module: Any, rows: Tensor, offs: Tensor, row_weights: Tensor) -> Tensor:
    """Return the output of rows sorted by expert, times the routing weight of each row, by the module's activation.

    Raises ValueError for weights that lie as (E, K, N).
    """
    if module.is_transposed:
        name = type(module).__name__
        raise ValueError(f"weights of {name} lie as (E, K, N), wanted (E, N, K) for its activation: use 'fp8tune'")
    w13, w2 = (weights_of(module, name, "folded") for name in ("gate_up_proj", "down_proj"))
    b13, b2 = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return fp8_moe_mlp(rows, w13, w2, offs, b13=b13, b2=b2, row_weights=row_weights, activation=module.act_fn)
