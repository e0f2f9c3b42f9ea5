"""Train a small mixture-of-experts layer in bfloat16 and in FP8, on the same data from the same start, and plot it.

    python docs/examples/moe_training.py                      # 300 steps; the loss curves go to moe_training.png
    python docs/examples/moe_training.py --steps 5 --tokens 64 --dim 32 --hidden 48 --experts 4

The runs differ in one function: ``torch._grouped_mm``, or ``fp8tune_kernels.fp8_grouped_mm`` in either recipe. On a
CPU FP8 is a reference that gives the same numbers and no speed. The plot needs matplotlib (extra ``examples``); without
it the losses are printed all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import fmean, stdev

import torch
from torch import nn

from fp8tune_kernels import fp8_grouped_mm

GroupedMM = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""rows of expert after expert (M, K), weights (E, K, N), end row of each expert (E,) -> (M, N)"""

LAST = 20
"""Steps at the end over which losses are averaged: each step draws new data."""


def in_bf16(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """PyTorch's own."""
    return torch._grouped_mm(rows, weights, offs=offs)


def in_fp8(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Ours: the router may give an expert any number of rows."""
    return fp8_grouped_mm(rows, weights, offs)


def in_folded_fp8(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Ours, with fewer casts."""
    return fp8_grouped_mm(rows, weights, offs, recipe="folded")


WAYS: dict[str, GroupedMM] = {"bf16": in_bf16, "fp8": in_fp8, "folded fp8": in_folded_fp8}


class MoE(nn.Module):
    """Each token goes to its two best experts, each a SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, dim: int, hidden: int, experts: int, grouped_mm: GroupedMM) -> None:
        super().__init__()
        self.grouped_mm = grouped_mm
        self.experts = experts
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim) / dim**0.5)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, dim) -> (tokens, dim)"""
        weights, chosen = self.router(x).softmax(-1).topk(2)
        by_expert = chosen.flatten().argsort(stable=True)  # one row for each pair of token and expert
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        offs = counts.cumsum(0).to(torch.int32)
        rows = x[by_expert // 2]
        gate, up = (self._multiply(rows, weight, offs) for weight in (self.w1, self.w3))
        out = self._multiply(nn.functional.silu(gate) * up, self.w2, offs)
        weighted = out.float() * weights.flatten()[by_expert, None]
        return torch.zeros_like(x).index_add(0, by_expert // 2, weighted)

    def _multiply(self, rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return self.grouped_mm(rows.bfloat16(), weights.bfloat16().transpose(1, 2), offs)


def start(grouped_mm: GroupedMM, options: argparse.Namespace) -> tuple[MoE, nn.Module]:
    """A layer, and the fixed random one that it learns. A seed gives the same two in each precision."""
    torch.manual_seed(options.seed)
    teacher = nn.Sequential(nn.Linear(options.dim, options.hidden), nn.Tanh(), nn.Linear(options.hidden, options.dim))
    model = MoE(options.dim, options.hidden, options.experts, grouped_mm)
    return model.to(options.device), teacher.to(options.device).requires_grad_(False)


def train(model: MoE, teacher: nn.Module, options: argparse.Namespace) -> list[float]:
    """The loss of every step, in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for _ in range(options.steps):
        x = torch.randn(options.tokens, options.dim, device=options.device)
        loss = nn.functional.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Loss against step, one line a curve; says so where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no plot: pip install matplotlib, or fp8tune's extra `examples`")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained")
    for name, losses in curves.items():
        axes.plot(losses, label=name)
    axes.set(xlabel="step", ylabel="mean squared error", yscale="log", title="MoE layer, bf16 and FP8 grouped GEMMs")
    axes.legend()
    figure.savefig(path)
    print(f"loss curves: {path}")


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Train all, print what the last steps say, and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 300), ("tokens", 4096), ("dim", 256), ("hidden", 512), ("experts", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", default="moe_training.png")
    options = parser.parse_args(arguments)
    curves = {name: train(*start(way, options), options) for name, way in WAYS.items()}
    last = {name: losses[-LAST:] for name, losses in curves.items()}
    for name, losses in last.items():
        scatter = f" +- {stdev(losses):.5f}" if len(losses) > 1 else ""
        print(f"{name}: loss {curves[name][0]:.5f} -> {fmean(losses):.5f}{scatter} over the last {len(losses)} steps")
    for name in ("fp8", "folded fp8"):
        print(f"{name} / bf16: {fmean(last[name]) / fmean(last['bf16']):.4f}")
    plot(curves, options.plot)
    return curves


if __name__ == "__main__":
    main()
