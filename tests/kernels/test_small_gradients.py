"""Very small gradients: what loss scaling gives back of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fp8tune_kernels import fp8_grouped_mm, fp8_moe_mlp, moe_layer

Operation = Callable[[Tensor, list[Tensor]], Tensor]

OFFS = torch.tensor([16, 48], dtype=torch.int32)

TINY = 2.0**-56
"""About 1e-17."""

NORMAL = 2.0**-10
"""About 1e-3."""


def grouped(x: Tensor, weights: list[Tensor], **options: str) -> Tensor:
    return fp8_grouped_mm(x, weights[0].transpose(1, 2), OFFS.to(x.device), **options)  # type: ignore[arg-type]


def mlp(x: Tensor, weights: list[Tensor], **options: str) -> Tensor:
    return fp8_moe_mlp(x, weights[0], weights[1], OFFS.to(x.device), **options)  # type: ignore[arg-type]


def layer(x: Tensor, weights: list[Tensor]) -> Tensor:
    ids = torch.searchsorted(OFFS, torch.arange(len(x)), right=True)[:, None].to(x.device)
    return moe_layer(x, weights[0], weights[1], ids, torch.ones(ids.shape, device=x.device))


OPERATIONS = {
    "default": grouped,
    "folded": partial(grouped, recipe="folded"),
    "moe-mlp": mlp,
    "moe-mlp, gate-up": partial(mlp, recompute="gate-up"),
    "moe-layer": layer,
}


def in_float64(x: Tensor, weights: list[Tensor]) -> Tensor:
    """The same product, or the same MLP, without FP8."""
    out = []
    for expert, rows in enumerate(x.tensor_split([int(OFFS[0])])):
        y = rows @ weights[0][expert].T
        if len(weights) == 2:
            gate, up = y.chunk(2, 1)
            y = (nn.functional.silu(gate) * up) @ weights[1][expert].T
        out.append(y)
    return torch.cat(out)


def gradients(operation: Operation, size: float, loss_scale: float, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of rows and weights for an output's gradient of about ``size``."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, factor: float = 1) -> Tensor:
        return (torch.randn(*shape, generator=generator) * factor).bfloat16()

    x, grad = normal(48, 64), normal(48, 64)
    is_mlp = getattr(operation, "func", operation) in (mlp, layer)
    weights = [normal(2, 128 if is_mlp else 64, 64, factor=1 / 8), normal(2, 64, 64, factor=1 / 8)][: 1 + is_mlp]
    leaves = [leaf.to(device, dtype).requires_grad_() for leaf in (x, *weights)]
    function = in_float64 if dtype == torch.float64 else operation
    out = function(leaves[0], leaves[1:])
    (out * (grad.to(device, out.dtype) * size)).sum().mul(loss_scale).backward()
    return [leaf.grad.double() / loss_scale for leaf in leaves if leaf.grad is not None]


def errors(operation: Operation, size: float, loss_scale: float, device: str) -> list[float]:
    found = gradients(operation, size, loss_scale, device, torch.bfloat16)
    right = gradients(operation, size, 1, "cpu", torch.float64)
    return [float((a.cpu() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_loss_scaling_gives_tiny_gradients_the_error_of_normal_ones(operation: str, device: str) -> None:
    multiply = OPERATIONS[operation]
    assert min(errors(multiply, TINY, 1, device)) > 0.1
    normal = errors(multiply, NORMAL, 1, device)
    assert max(normal) < 0.08
    assert errors(multiply, TINY, 2.0**16, device) == pytest.approx(normal, rel=0.05)
    assert errors(multiply, TINY, NORMAL / TINY, device) == normal  # the same bytes but for the exponents


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_of_1e_12_need_no_scaling(operation: str, device: str) -> None:
    """From a size on that the pages name."""
    assert errors(OPERATIONS[operation], 2.0**-40, 1, device) == pytest.approx(
        errors(OPERATIONS[operation], NORMAL, 1, device), rel=0.05
    )


def test_a_gradient_scaler_does_it(device: str) -> None:
    leaves = [torch.randn(48, 64, device=device).bfloat16(), torch.randn(2, 64, 64, device=device)]
    weights = nn.Parameter(leaves[1])
    optimizer = torch.optim.SGD([weights], lr=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16)
    out = fp8_grouped_mm(leaves[0], weights.transpose(1, 2), OFFS.to(device), recipe="folded")
    scaler.scale(out.float().sum() * TINY).backward()
    scaler.unscale_(optimizer)
    assert weights.grad is not None
    assert bool(weights.grad.any())
    assert float(weights.grad.abs().max()) < 1e-14
