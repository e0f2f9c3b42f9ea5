"""A program that launches the kernel of ``swiglu.py`` on three sizes."""

import torch
from swiglu import swiglu

device = "cuda" if torch.cuda.is_available() else "cpu"
for tokens in (2048, 4096, 8192):
    gate, up = torch.randn(2, tokens, 4096, device=device).bfloat16()
    swiglu(gate, up)
