"""The experts as one operation, ``fp8_moe_mlp``: the activation is cast as it is made, never written in bfloat16."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from fp8tune_kernels.gemm.moe_mlp import fp8_moe_mlp
from fp8tune_kernels.transformers_experts.once import weights_of

__all__ = ["multiply_mlp"]

SILU = (nn.SiLU, SiLUActivation)


def multiply_mlp(module: Any, rows: Tensor, offs: Tensor, row_weights: Tensor) -> Tensor:
    """gate_up_proj, the gate and down_proj of rows sorted by expert, times the routing weight of each row.

    Raises ValueError for a module whose gate or layout is another than that of most models.
    """
    _check(module)
    w13, w2 = (weights_of(module, name, "folded") for name in ("gate_up_proj", "down_proj"))
    b13, b2 = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    activation = "swiglu" if isinstance(module.act_fn, SILU) else module.act_fn
    return fp8_moe_mlp(rows, w13, w2, offs, b13=b13, b2=b2, row_weights=row_weights, activation=activation)


def _check(module: Any) -> None:
    """``_apply_gate`` of most modules is transformers' own: the activation of the first half, times the second."""
    name = type(module).__name__
    if module.is_transposed:
        raise ValueError(f"weights of {name} lie as (E, K, N), wanted (E, N, K) for one operation: use 'fp8tune'")
    if not module.has_gate or type(module)._apply_gate.__module__ != "transformers.integrations.moe":
        raise ValueError(f"{name} has no gate, or one of its own, that one operation does not know: use 'fp8tune'")
