"""A program that launches the kernel of ``swiglu.py`` on three sizes."""

import torch
from swiglu import swiglu

device = "cuda" if torch.cuda.is_available() else "cpu"
for tokens in (2048, 4096, 8192):
    gate = torch.randn(tokens * 4096, device=device, dtype=torch.bfloat16)
    up = torch.randn(tokens * 4096, device=device, dtype=torch.bfloat16)
    swiglu(gate, up)
