"""Train four blocks of norm, short convolution, gated norm and MLP of flash-linear-attention.

fp8tune tune --budget 240s -- python benchmarks/real/fla_steps.py
"""

from __future__ import annotations

import torch
from fla.modules import FusedRMSNormGated, GatedMLP, RMSNorm, ShortConvolution


class Block(torch.nn.Module):
    """Norm, convolution and MLP, with a residual."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.gated_norm = RMSNorm(size), FusedRMSNormGated(size)
        self.conv = ShortConvolution(size, kernel_size=4, activation="silu")
        self.gate = torch.nn.Linear(size, size, bias=False)
        self.mlp = GatedMLP(size, hidden_ratio=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` and what the block adds to it."""
        y = self.norm(x)
        y = self.gated_norm(self.conv(y)[0], self.gate(y))
        return torch.add(x, self.mlp(y))


if __name__ == "__main__":
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(Block(2048) for _ in range(4))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4)
    x = torch.randn(8, 2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        loss = blocks(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
