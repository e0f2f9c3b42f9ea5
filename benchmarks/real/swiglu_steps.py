"""The SwiGLU of ``docs/examples/swiglu.py`` between matrix products: the run of ``fp8tune tune`` in the README.

PYTHONPATH=docs/examples fp8tune tune --budget 60s -- python benchmarks/real/swiglu_steps.py
"""

from __future__ import annotations

import importlib
import os

import torch

SIZES = ((4096, 14336), (4096, 14336), (14336, 4096))
STEPS = 300

if __name__ == "__main__":
    swiglu = importlib.import_module("swiglu").swiglu  # of docs/examples, which is no package
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # of torchrun
    torch.manual_seed(0)
    w1, w3, w2 = (torch.randn(size, device="cuda", dtype=torch.bfloat16) / 64 for size in SIZES)
    for _ in range(STEPS):
        for tokens in (2048, 4096):
            x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
            y = swiglu(x @ w1, x @ w3) @ w2
    torch.cuda.synchronize()
