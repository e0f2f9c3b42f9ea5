"""Experts of torchtitan in FP8: one line patches them.

from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

RoutedExperts.forward = routed_experts_method()        # the layer, tokens to tokens
GroupedExperts._grouped_mm = grouped_mm_method()       # or each GEMM alone
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .gemm.gathered_weights import GatheredWeights, multipliable, quantize_after_all_gather
from .gemm.grouped_mm import fp8_grouped_mm
from .moe.layer import fp8_moe_mlp, moe_layer

__all__ = ["grouped_mm_method", "quantize_after_all_gather", "routed_experts_method"]

CLAMP = 7.0
"""``swiglu_limit`` of gpt-oss, whose activation ``moe_layer`` knows."""


def grouped_mm_method(**options: Any) -> Callable[..., Tensor]:
    """Return a ``_grouped_mm`` for experts of torchtitan, of ``fp8_grouped_mm`` with these options.

    It takes A (M, K), row-major, ``offs`` (E,), int32, and returns (M, N), bfloat16. Versions of torchtitan give
    weights (E, N, K) as they are stored, named ``weight_EOI`` or ``weight_ENK``, or their transposed view ``B_t``. Of
    stored weights it multiplies FP8 values that were made after an all-gather (:func:`quantize_after_all_gather`).
    Others are quantized at each call.

    Raises what ``fp8_grouped_mm`` raises.
    """

    def grouped_mm(
        experts: nn.Module,
        *,
        A: Tensor,
        offs: Tensor,
        weight_EOI: Tensor | None = None,
        weight_ENK: Tensor | None = None,
        B_t: Tensor | None = None,
    ) -> Tensor:
        weights = weight_ENK if weight_EOI is None else weight_EOI
        if weights is not None:
            return fp8_grouped_mm(A, multipliable(weights), offs, **options)
        if B_t is None:
            raise ValueError("weight_EOI is None, wanted the weights (E, N, K)")
        return fp8_grouped_mm(A, B_t, offs, **options)

    return grouped_mm


def routed_experts_method(*, precision: str = "fp8", **options: Any) -> Callable[..., Tensor]:
    """Return a ``forward`` for ``RoutedExperts``, of ``moe_layer`` with these options.

    It replaces the order of rows, the experts and the weighted sum: x (T, D), scores and ids (T, top_k) -> (T, D). With
    expert parallelism the dispatcher orders rows and sums, and ``fp8_moe_mlp`` multiplies between the two, in FP8.

    Experts have w1, w2 and w3, which it concatenates at each call; or gate and up in one parameter, as torchtitan's
    ``FusedGroupedExperts`` and gpt-oss do, which costs nothing. Raises ValueError for gpt-oss with another limit than 7
    or under tensor parallelism, and what ``moe_layer`` raises.
    """

    def forward(
        routed: Any,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        w13, w2, layer = _operands(routed.inner_experts)
        dispatcher = routed.token_dispatcher
        if getattr(dispatcher, "ep_mesh", None) is None:
            x = x_TD.contiguous()
            out = moe_layer(x, w13, w2, topk_expert_ids_TK, topk_scores_TK, precision=precision, **layer, **options)
            return out.type_as(x_TD)
        if precision == "bf16":
            raise ValueError("precision must be 'fp8' or 'auto' with expert parallelism, got 'bf16'")
        rows, counts, metadata = dispatcher.dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        out = fp8_moe_mlp(rows, w13, w2, offs, **layer, **options).type_as(rows)
        combined: Tensor = dispatcher.combine(out, metadata, x_TD)
        return combined

    return forward


def _operands(experts: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return this device's w13 and w2, and the arguments that say what the experts compute."""
    if hasattr(experts, "mlp1_weight_EGD"):
        if experts.swiglu_limit != CLAMP:
            raise ValueError(f"swiglu_limit must be {CLAMP}, got {experts.swiglu_limit}")
        if any(placement.is_shard(2) for placement in getattr(experts.mlp2_weight_EDF, "placements", ())):
            raise ValueError("mlp2_weight_EDF must not be sharded on its columns: each rank would add mlp2_bias_ED")
        w13, w2, b13, b2 = (
            _local(getattr(experts, name))
            for name in ("mlp1_weight_EGD", "mlp2_weight_EDF", "mlp1_bias_EG", "mlp2_bias_ED")
        )
        return w13, w2, {"b13": b13, "b2": b2, "activation": "gpt-oss", "layout": "interleaved"}
    w2 = _local(experts.w2_EDF)
    if hasattr(experts, "w13"):
        return _local(experts.w13).flatten(1, 2), w2, {"layout": "interleaved"}  # (E, F, 2, D)
    w1, w3 = _local(experts.w1_EFD), _local(experts.w3_EFD)
    if isinstance(w1, GatheredWeights):
        raise ValueError("w1_EFD must not be quantized after its all-gather: FP8 values are not concatenated")
    return torch.cat([w1, w3], 1), w2, {}


def _local(w: Any) -> Tensor:
    local: Tensor = w.to_local() if hasattr(w, "to_local") else w
    return local
