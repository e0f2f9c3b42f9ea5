"""Operands of a grouped GEMM, its three products in plain torch, and how near two results are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8tune_kernels import QuantizedWeights, fp8_grouped_mm
from fp8tune_kernels.groups import group_ends

M, K, N, E = 192, 64, 48, 4

Results = tuple[Tensor, Tensor, Tensor]
"""out (M, N), the gradients of A (M, K) and of the weights (E, N, K)."""

Make = Callable[[Tensor], "Tensor | QuantizedWeights"]
"""Weights (E, N, K) -> the operand ``B_t``."""


@dataclass(frozen=True)
class Layer:
    """Operands as a layer has them, and the gradient that comes back."""

    A: Tensor
    weights: Tensor
    """(E, N, K)."""
    offs: Tensor
    grad: Tensor

    @property
    def B_t(self) -> Tensor:  # noqa: N802 - the operand's name
        return self.weights.mT

    def of_dtype(self, dtype: torch.dtype) -> Layer:
        return replace(self, A=self.A.to(dtype), weights=self.weights.to(dtype))


def random_layer(
    routing: str, device: str, dtype: torch.dtype = torch.bfloat16, *, columns: int = N, rows: int = M
) -> Layer:
    """Random operands, rows of very different size. MXFP8 takes multiples of 32 ``columns``."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    offs = torch.tensor(group_ends(routing, rows, E), dtype=torch.int32, device=device)
    spread = torch.logspace(-3, 3, rows, 2, device=device)[:, None].to(dtype)
    return Layer(normal(rows, K) * spread, normal(E, columns, K), offs, normal(rows, columns).bfloat16())


def viewed(w: Tensor) -> Tensor:
    return w.mT


def run(layer: Layer, call: Callable[..., Tensor] = fp8_grouped_mm, make: Make = viewed, **options: Any) -> Results:
    """Forward and backward; rows of no group are left out of what is compared."""
    A, w = layer.A.clone().requires_grad_(), layer.weights.clone().requires_grad_()
    out = call(A, make(w), layer.offs, **options)
    out.backward(layer.grad.to(out.dtype))
    assert A.grad is not None
    assert w.grad is not None
    assert (A.grad.dtype, w.grad.dtype, w.grad.stride()) == (A.dtype, w.dtype, w.stride())
    used = int(layer.offs[-1])
    return out.detach()[:used], A.grad[:used], w.grad


def by_group(layer: Layer, operand: Callable[[Tensor, int], Tensor] = lambda x, dim: x) -> Results:
    """Three products of each group in float32; ``operand``: what becomes of a matrix that is contracted over dim."""
    out, grad_A, grad_weights, start = [], [], [], 0
    for w, end in zip(layer.weights.float(), layer.offs.tolist(), strict=True):
        a, g = layer.A[start:end].float(), layer.grad[start:end].float()
        out.append(operand(a, 1) @ operand(w, 1).t())
        grad_A.append(operand(g, 1) @ operand(w, 0))
        grad_weights.append(operand(g, 0).t() @ operand(a, 0) if end > start else torch.zeros_like(w))
        start = end
    return torch.cat(out), torch.cat(grad_A), torch.stack(grad_weights)


def sqnr_db(result: Tensor, right: Tensor) -> float:
    """Signal over noise: 10 log10 of squares summed, over that of the errors; infinite where nothing differs."""
    signal, noise = right.detach().double(), result.detach().double() - right.detach().double()
    return float(10 * torch.log10(signal.square().sum() / noise.square().sum()))


def assert_same(results: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for result, expected in zip(results, right, strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
