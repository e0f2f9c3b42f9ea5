"""A stand-in for the experts of torchtitan, written after its present interface."""

from __future__ import annotations

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
