"""Training steps of two Mamba-2 blocks of state-spaces/mamba (at e9594ce), with its 14 autotuned kernels.

fp8tune tune --budget 200s -- python benchmarks/real/mamba_steps.py
"""

from __future__ import annotations

import importlib

import torch

STEPS = 100

if __name__ == "__main__":
    Mamba2 = importlib.import_module("mamba_ssm.modules.mamba2").Mamba2
    torch.manual_seed(0)
    options = {"d_model": 2048, "d_state": 128, "headdim": 64, "use_mem_eff_path": False}
    blocks = torch.nn.ModuleList(Mamba2(layer_idx=index, **options) for index in range(2)).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4)
    x = torch.randn(4, 2048, 2048, device="cuda", dtype=torch.bfloat16)
    for _ in range(STEPS):
        y = x
        for block in blocks:
            y = y + block(y)
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
