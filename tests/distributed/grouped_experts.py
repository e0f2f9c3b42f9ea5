"""Stand-ins for the experts of torchtitan, written after its present interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class GroupedExperts(nn.Module):
    """``w2(silu(w1 x) * w3 x)`` of rows that are sorted by expert; a converter replaces ``_grouped_mm``."""

    def __init__(self, dim: int, hidden: int, experts: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(experts, hidden, dim, dtype=dtype) / dim**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(experts, dim, hidden, dtype=dtype) / hidden**0.5)
        self.w3_EFD = nn.Parameter(torch.randn(experts, hidden, dim, dtype=dtype) / dim**0.5)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x = x_RD.bfloat16()
        gate = self._grouped_mm(A=x, weight_EOI=self.w1_EFD, offs=offs)
        up = self._grouped_mm(A=x, weight_EOI=self.w3_EFD, offs=offs)
        out = self._grouped_mm(A=nn.functional.silu(gate) * up, weight_EOI=self.w2_EDF, offs=offs)
        return out.type_as(x_RD)

    def _grouped_mm(self, *, A: Tensor, weight_EOI: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(A, weight_EOI.bfloat16().transpose(-2, -1), offs=offs)


class FusedGroupedExperts(nn.Module):
    """Experts whose gate and up are one parameter (E, F, 2, D), as torchtitan's override has them."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(experts, hidden, 2, dim) / dim**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)


class GptOssGroupedExperts(nn.Module):
    """Experts of gpt-oss: gate and up in turn, clamped, and biases."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.swiglu_limit = 7.0
        self.mlp1_weight_EGD = nn.Parameter(torch.randn(experts, 2 * hidden, dim) / dim**0.5)
        self.mlp1_bias_EG = nn.Parameter(torch.randn(experts, 2 * hidden))
        self.mlp2_weight_EDF = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)
        self.mlp2_bias_ED = nn.Parameter(torch.randn(experts, dim))


class LocalTokenDispatcher:
    """Rows by expert and back, on one device."""

    def dispatch(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        order = torch.argsort(ids.view(-1), stable=True)
        tokens = order // ids.shape[1]
        return x[tokens], counts, (tokens, scores.view(-1)[order])

    def combine(self, rows: Tensor, metadata: Any, x: Tensor) -> Tensor:
        tokens, scores = metadata
        return torch.zeros_like(x).index_add(0, tokens, (rows.float() * scores[:, None]).to(rows.dtype))


class RoutedExperts(nn.Module):
    """Dispatch, experts and combine; a patch replaces its forward pass."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.inner_experts, self.token_dispatcher = experts, LocalTokenDispatcher()

    def forward(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        operands = x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        rows, counts, metadata = self.token_dispatcher.dispatch(*operands)
        return self.token_dispatcher.combine(self.inner_experts(rows, counts), metadata, x_TD)
