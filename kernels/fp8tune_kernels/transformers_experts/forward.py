"""The forward pass of experts as transformers declares their modules.

It is ``moe_layer``, or for a gate that this lacks, and on request, a ``fp8_grouped_mm`` for each of:

    rows     the hidden state of each token, once for each of its top_k experts, sorted by expert
    h        gate_up_proj of the rows, and the module's own gate; or up_proj and its activation
    out      down_proj of h, put back, times the routing weights, summed over the experts of each token

    hidden_states  (T, hidden)
    top_k_index    (T, top_k), integers; an index past the last expert, as expert parallelism has them, adds nothing
    top_k_weights  (T, top_k)

Of the module it reads what ``use_experts_implementation`` declares: ``num_experts``, ``has_gate``, ``has_bias``,
``is_transposed`` (weights lie as (E, K, N)) and ``_apply_gate``. Sizes must be multiples of 16: else both raise
ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ..gemm.grouped_mm import fp8_grouped_mm
from ..moe.layer import moe_layer
from ..moe.permutation import scatter, sort_rows
from .once import layer_weights_of, weights_of

SILU = (nn.SiLU, SiLUActivation)

GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss"
"""Module whose gate clamps gate and up, which lie in turn."""


@dataclass(frozen=True)
class Options:
    """Options for multiplying by the experts of a model."""

    precision: str = "fp8"
    is_layer: bool = True
    """Use ``moe_layer`` for modules whose gate it knows; otherwise ``fp8_grouped_mm`` for each GEMM."""
    recipe: str = "default"
    """Recipe of ``fp8_grouped_mm``."""


class Gate(NamedTuple):
    """Arguments of ``moe_layer`` that describe the gate of a module."""

    activation: str
    layout: str


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, options: Options
) -> Tensor:
    """Return (T, hidden), in the dtype of ``hidden_states``."""
    if options.is_layer and (gate := gate_of(module)):
        out = _multiply_layer(module, gate, hidden_states, top_k_index, top_k_weights, options.precision)
        return out.to(hidden_states.dtype)
    T, top_k = top_k_index.shape
    rows, offs, order, place = sort_rows(hidden_states, top_k_index, module.num_experts)
    h = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", rows, offs, options)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    out = scatter(_linear(module, "down_proj", h, offs, options), order, place)
    # as a batched product, which writes no rows: 0.8 to 3.3 times as long with its gradients on an H100
    return (out.view(T, top_k, out.shape[1]) * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def gate_of(module: Any) -> Gate | None:
    """Return the gate that a module of experts has; None without one, and for one that ``moe_layer`` lacks."""
    origin = type(module)._apply_gate.__module__
    if origin == GPT_OSS and (module.alpha, module.limit) == (1.702, 7.0):
        return Gate("gpt-oss", "interleaved")
    is_swiglu = module.has_gate and origin == "transformers.integrations.moe" and isinstance(module.act_fn, SILU)
    return Gate("swiglu", "halves") if is_swiglu else None


def _multiply_layer(module: Any, gate: Gate, x: Tensor, ids: Tensor, weights: Tensor, precision: str) -> Tensor:
    """Return the experts' output of tokens, (T, hidden), bfloat16."""
    w13, w2 = (layer_weights_of(module, name) for name in ("gate_up_proj", "down_proj"))
    b13, b2 = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return moe_layer(x.contiguous(), w13, w2, ids, weights, b13=b13, b2=b2, precision=precision, **gate._asdict())


def _linear(module: Any, name: str, rows: Tensor, offs: Tensor, options: Options) -> Tensor:
    B_t = weights_of(module, name, options.recipe)
    if isinstance(B_t, Tensor) and not module.is_transposed:
        B_t = B_t.transpose(1, 2)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return fp8_grouped_mm(rows, B_t, offs, bias, precision=options.precision, recipe=options.recipe)
