"""The activation of a SwiGLU layer: a kernel under ``@triton.autotune``, and the function that launches it."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps) for block in (4096, 2048, 1024, 512) for warps in (1, 2, 4, 8, 16)
]


@triton.autotune(configs=CONFIGS, key=["elements"])
@triton.jit
def kernel(gate_ptr, up_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    """``silu(gate) * up``, element by element."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < elements).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < elements).to(tl.float32)
    tl.store(out_ptr + at, gate * tl.sigmoid(gate) * up, mask=at < elements)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of two tensors of one shape."""
    out = torch.empty_like(gate)
    kernel[lambda config: (triton.cdiv(out.numel(), config["BLOCK"]),)](gate, up, out, out.numel())
    return out
