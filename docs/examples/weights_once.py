"""Accumulate gradients over four micro-batches with weights that are quantized once, and compare the loss curves.

    python docs/examples/weights_once.py                      # 100 steps of bf16, FP8, and FP8 with weights once
    python docs/examples/weights_once.py --steps 5 --tokens 32 --dim 32 --hidden 48 --experts 4

The two runs in FP8 print the same losses: the codes are the same, made once a step in place of four times. On a CPU FP8
is a reference that gives the same numbers and no speed.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from statistics import fmean, stdev

import torch
from torch import nn

from fp8tune_kernels import fp8_grouped_mm, quantize_weights

MICRO_BATCHES = 4

LAST = 20
"""Steps at the end over which losses are averaged: each step draws new data."""

GroupedMM = Callable[[torch.Tensor, nn.Parameter, torch.Tensor], torch.Tensor]
"""rows of expert after expert (M, K), weights (E, N, K), end row of each expert (E,) -> (M, N)"""


@contextlib.contextmanager
def in_bf16(weights: list[nn.Parameter]) -> Iterator[GroupedMM]:
    """Multiply by PyTorch's own."""
    yield lambda rows, w, offs: torch._grouped_mm(rows, w.bfloat16().transpose(1, 2), offs=offs)


@contextlib.contextmanager
def in_fp8(weights: list[nn.Parameter]) -> Iterator[GroupedMM]:
    """Quantize weights at each call."""
    yield lambda rows, w, offs: fp8_grouped_mm(rows, w.transpose(1, 2), offs)


@contextlib.contextmanager
def weights_once(weights: list[nn.Parameter]) -> Iterator[GroupedMM]:
    """Quantize weights now, and check at the end that they did not change."""
    with contextlib.ExitStack() as block:
        quantized = {w: block.enter_context(quantize_weights(w)) for w in weights}
        yield lambda rows, w, offs: fp8_grouped_mm(rows, quantized[w], offs)


class Experts(nn.Module):
    """Each token goes to its two best experts: ``w2(silu(w1 x))``."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor, grouped_mm: GroupedMM) -> torch.Tensor:
        """(tokens, dim) -> (tokens, dim)"""
        weights, chosen = self.router(x).softmax(-1).topk(2)
        by_expert = chosen.flatten().argsort(stable=True)  # one row for each pair of token and expert
        offs = torch.bincount(chosen.flatten(), minlength=len(self.w1)).cumsum(0).to(torch.int32)
        rows = nn.functional.silu(grouped_mm(x[by_expert // 2].bfloat16(), self.w1, offs))
        out = grouped_mm(rows, self.w2, offs).float() * weights.flatten()[by_expert, None]
        return torch.zeros_like(x).index_add(0, by_expert // 2, out)


def train(
    prepared: Callable[[list[nn.Parameter]], contextlib.AbstractContextManager[GroupedMM]], options: argparse.Namespace
) -> list[float]:
    """The loss of every step: the layer learns what a fixed random layer does."""
    torch.manual_seed(options.seed)
    teacher = nn.Sequential(nn.Linear(options.dim, options.hidden), nn.Tanh(), nn.Linear(options.hidden, options.dim))
    teacher.to(options.device).requires_grad_(False)
    model = Experts(options.dim, options.hidden, options.experts).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for _ in range(options.steps):
        total = torch.zeros((), device=options.device)
        with prepared([model.w1, model.w2]) as grouped_mm:
            for _ in range(MICRO_BATCHES):
                x = torch.randn(options.tokens, options.dim, device=options.device)
                loss = nn.functional.mse_loss(model(x, grouped_mm), teacher(x)) / MICRO_BATCHES
                loss.backward()
                total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.stack(losses).tolist()


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Train all three, and print what the last steps say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 100), ("tokens", 128), ("dim", 64), ("hidden", 128), ("experts", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    runs = {"bf16": in_bf16, "fp8": in_fp8, "fp8, weights once": weights_once}
    curves = {name: train(prepared, options) for name, prepared in runs.items()}
    for name, losses in curves.items():
        last = losses[-LAST:]
        scatter = f" +- {stdev(last):.5f}" if len(last) > 1 else ""
        print(f"{name}: loss {losses[0]:.5f} -> {fmean(last):.5f}{scatter} over the last {len(last)} steps")
    return curves


if __name__ == "__main__":
    main()
