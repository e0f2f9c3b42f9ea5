"""How near the results of ``fp8_grouped_mm`` are in each recipe, on operands that are easy and operands that are not.

    python -m benchmarks.folded_accuracy [--device cpu]

The signal-to-quantization-noise ratio of the output and of both gradients in dB, against float64: of all elements, and
of the worst group. On a CPU the GEMMs are references in float32 on the same codes. The gradients of the last row are
those of a layer of experts that learns for some steps.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8tune_kernels import fp8_grouped_mm
from fp8tune_kernels.groups import group_ends

M, N, K, E = 2048, 352, 512, 8
RECIPES = ("default", "folded")
STEPS = 40
"""Of training before the gradients are taken."""


@dataclass(frozen=True)
class Operands:
    """Of one layer of experts."""

    A: Tensor  # (M, K)
    weights: Tensor  # (E, N, K)
    grad: Tensor  # (M, N)
    offs: Tensor  # (E,)


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _student(*shape: int, generator: torch.Generator) -> Tensor:
    """Student's t with three degrees of freedom: a normal over the root of a mean of squares."""
    squares = torch.randn(3, *shape, generator=generator).square().mean(0)
    return torch.randn(*shape, generator=generator) / squares.sqrt()


def _operands(draw: Callable[..., Tensor], change: Callable[[Operands, torch.Generator], Operands]) -> Operands:
    generator = torch.Generator().manual_seed(0)
    A, weights, grad = (draw(*shape, generator=generator) for shape in ((M, K), (E, N, K), (M, N)))
    offs = torch.tensor(group_ends("ragged", M, E), dtype=torch.int32)
    return change(Operands(A, weights / K**0.5, grad, offs), generator)


def _tokens(given: Operands, generator: torch.Generator) -> Operands:
    """Tokens whose activations and gradients differ by up to 2**12 in size, each independently."""
    sizes = [torch.exp2(torch.randint(0, 13, (M, 1), generator=generator).float()) for _ in range(2)]
    return Operands(given.A * sizes[0], given.weights, given.grad * sizes[1], given.offs)


def _channels(given: Operands, generator: torch.Generator) -> Operands:
    """One channel in 64 is 64 times as large, of activations and of gradients."""
    A, grad = given.A.clone(), given.grad.clone()
    A[:, ::64] *= 64
    grad[:, ::64] *= 64
    return Operands(A, given.weights, grad, given.offs)


def _weights(given: Operands, generator: torch.Generator) -> Operands:
    """Output columns of the weights differ by up to 2**12 in size."""
    sizes = torch.exp2(torch.randint(0, 13, (E, N, 1), generator=generator).float())
    return Operands(given.A, given.weights * sizes, given.grad, given.offs)


def _plain(given: Operands, generator: torch.Generator) -> Operands:
    return given


def _learned() -> Operands:
    """A layer of experts behind a nonlinearity that learns a fixed random function, in float32; what its last step has.
    The loss is a mean over 2,048 tokens, so that gradients are small."""
    generator = torch.Generator().manual_seed(0)
    offs = torch.tensor(group_ends("ragged", M, E), dtype=torch.int32)
    weights = nn.Parameter(_normal(E, N, K, generator=generator) / K**0.5)
    head = nn.Parameter(_normal(64, N, generator=generator) / N**0.5)
    teacher = _normal(64, K, generator=generator) / K**0.5
    optimizer = torch.optim.AdamW([weights, head], lr=1e-3)
    spread = torch.exp(_normal(K, generator=generator))  # channels of activations differ
    for _ in range(STEPS):
        A = nn.functional.silu(_normal(M, K, generator=generator) * spread)
        out = torch.cat([a @ w.t() for a, w in zip(_groups(A, offs), weights, strict=True)])
        out.retain_grad()
        loss = nn.functional.mse_loss(nn.functional.silu(out) @ head.t(), torch.tanh(A @ teacher.t()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert out.grad is not None
    return Operands(A.detach(), weights.detach(), out.grad, offs)


CASES: dict[str, Callable[[], Operands]] = {
    "normal": lambda: _operands(_normal, _plain),
    "heavy-tailed (t, 3 degrees)": lambda: _operands(_student, _plain),
    "outlier channels, 64 times": lambda: _operands(_normal, _channels),
    "tokens over 2**12": lambda: _operands(_normal, _tokens),
    "columns of weights over 2**12": lambda: _operands(_normal, _weights),
    f"after {STEPS} steps of training": _learned,
}


def _groups(x: Tensor, offs: Tensor) -> list[Tensor]:
    ends = offs.tolist()
    return [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def exact(given: Operands) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The output and both gradients, a group each, in float64."""
    A, grad = (_groups(x.double(), given.offs) for x in (given.A, given.grad))
    parts = zip(A, given.weights.double(), grad, strict=True)
    products = [(a @ w.t(), g @ w, g.t() @ a) for a, w, g in parts]
    out, grad_A, grad_w = (list(each) for each in zip(*products, strict=True))
    return out, grad_A, grad_w


def sqnr(found: list[Tensor], right: list[Tensor]) -> tuple[float, float]:
    """Of all elements, and of the worst group that has any, in dB."""
    noise = [float((f.detach().double() - r).square().sum()) for f, r in zip(found, right, strict=True)]
    signal = [float(r.square().sum()) for r in right]
    worst = min(10 * math.log10(s / n) for s, n in zip(signal, noise, strict=True) if s and n)
    return 10 * math.log10(sum(signal) / sum(noise)), worst


def measured(given: Operands, recipe: str, device: str) -> list[tuple[float, float]]:
    """Of the output, the input's gradient and the weights' gradient."""
    A, weights, grad = (x.bfloat16().to(device) for x in (given.A, given.weights, given.grad))
    rounded = Operands(A.cpu(), weights.detach().cpu(), grad.cpu(), given.offs)
    A.requires_grad_()
    weights.requires_grad_()
    out = fp8_grouped_mm(A, weights.transpose(1, 2), given.offs.to(device), recipe=recipe)
    out.backward(grad)
    assert A.grad is not None
    assert weights.grad is not None
    found = _groups(out.detach().cpu(), given.offs), _groups(A.grad.cpu(), given.offs), list(weights.grad.cpu())
    return [sqnr(each, right) for each, right in zip(found, exact(rounded), strict=True)]


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    print(f"M={M} N={N} K={K}, {E} ragged groups, {device}; dB of all elements (of the worst group)\n")
    print("| operands | recipe | output | gradient of A | gradient of the weights |\n|---|---|---:|---:|---:|")
    for name, make in CASES.items():
        given = make()
        for recipe in RECIPES:
            cells = (f"{whole:.1f} ({worst:.1f})" for whole, worst in measured(given, recipe, device))
            print(f"| {name} | {recipe} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
