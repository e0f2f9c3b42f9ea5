"""The autotuned kernels of :mod:`benchmarks.record_cost`: y = silu(x) * factor, and its gradient."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((1024, 4), (2048, 8))]


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def silu_forward(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``y = silu(x) * factor``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    tl.store(y_ptr + at, x * tl.sigmoid(x) * factor, mask=at < n)


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def silu_backward(x_ptr, dy_ptr, dx_ptr, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``dx = dy * factor * silu'(x)``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < n).to(tl.float32)
    gate = tl.sigmoid(x)
    tl.store(dx_ptr + at, dy * factor * gate * (1 + x * (1 - gate)), mask=at < n)


class _ScaledSilu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        y = torch.empty_like(x)
        silu_forward[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), factor)
        context.save_for_backward(x)
        context.factor = factor
        return y

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,), (dy,) = context.saved_tensors, gradients
        dx = torch.empty_like(x)
        silu_backward[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, dy, dx, x.numel(), context.factor)
        return dx, None


def scaled_silu(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``silu(x) * factor``, with a gradient."""
    y: torch.Tensor = _ScaledSilu.apply(x, factor)  # type: ignore[no-untyped-call]
    return y
