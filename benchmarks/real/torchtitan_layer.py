"""Time the routed experts of torchtitan: its own forward pass, each GEMM in FP8, and the layer.

    python -m benchmarks.real.torchtitan_layer                              # three models at 4,096 and 16,384 tokens
    python -m benchmarks.real.torchtitan_layer --layers tiny --tokens 64  # anywhere: nothing is timed

The modules stand in for torchtitan's, whose operations they call: rows by ``argsort``, ``torch._grouped_mm``, and a
``scatter_add``. A step is forward and backward, without the router; medians of do_bench in us.

    own         bfloat16
    gemms       ``grouped_mm_method``
    layer       ``routed_experts_method``, which concatenates w1 and w3
    fused       the same with gate and up in one parameter
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.moe_layer import DEFAULT_LAYERS, LAYERS, TOKENS, cosines
from fp8tune_kernels.torchtitan import grouped_mm_method, routed_experts_method


class Experts(nn.Module):
    """GroupedExperts: w1, w2 and w3."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.w1_EFD = _parameter(experts, hidden, dim)
        self.w2_EDF = _parameter(experts, dim, hidden)
        self.w3_EFD = _parameter(experts, hidden, dim)

    def forward(self, x: Tensor, counts: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
        """Multiply rows by their experts."""
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = (multiply(self, A=x, B_t=w.transpose(-2, -1), offs=offs) for w in (self.w1_EFD, self.w3_EFD))
        return multiply(self, A=functional.silu(gate) * up, B_t=self.w2_EDF.transpose(-2, -1), offs=offs)


class Fused(nn.Module):
    """FusedGroupedExperts: gate and up in one parameter."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.w13 = _parameter(experts, hidden, 2, dim)
        self.w2_EDF = _parameter(experts, dim, hidden)


class Routed(nn.Module):
    """RoutedExperts on one device."""

    token_dispatcher: Any = None

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.inner_experts = experts

    def run(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
        """Order rows, multiply, and add up, as torchtitan does."""
        order = torch.argsort(ids.view(-1), stable=True)
        tokens = order // ids.shape[1]
        rows: Tensor = self.inner_experts(x[tokens], counts, multiply)
        rows = (rows.float() * scores.view(-1)[order, None]).to(rows.dtype)
        return torch.zeros_like(x).scatter_add(0, tokens[:, None].expand_as(rows), rows)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) * shape[-1] ** -0.5).bfloat16())


def in_bf16(_: nn.Module, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """Multiply as torchtitan does."""
    return torch._grouped_mm(A, B_t, offs=offs)


def contenders(dim: int, hidden: int, experts: int) -> dict[str, tuple[Routed, Callable[..., Tensor]]]:
    """Return name -> module and its forward pass; all have the same weights."""
    two, one = Routed(Experts(dim, hidden, experts)), Routed(Fused(dim, hidden, experts))
    own: Any = two.inner_experts
    fused: Any = one.inner_experts
    with torch.no_grad():
        fused.w13.copy_(torch.stack([own.w1_EFD, own.w3_EFD], 2))
        fused.w2_EDF.copy_(own.w2_EDF)
    gemms = grouped_mm_method()
    layer = routed_experts_method()
    return {
        "own": (two, functools.partial(two.run, multiply=in_bf16)),
        "gemms": (two, functools.partial(two.run, multiply=gemms)),
        "layer": (two, functools.partial(layer, two)),
        "fused": (one, functools.partial(layer, one)),
    }


def row(name: str, tokens: int, device: str, milliseconds: int) -> str:
    """Return a line: times, peak memory, and the least cosine of the output and gradients of tokens to torchtitan's."""
    dim, hidden, experts, top_k = LAYERS[name]
    torch.manual_seed(0)
    with torch.device(device):
        x, scores = torch.randn(tokens, dim).bfloat16().requires_grad_(), torch.rand(tokens, top_k).requires_grad_()
        ids = torch.rand(tokens, experts).topk(top_k).indices
        grad = torch.randn(tokens, dim).bfloat16()
        functions = contenders(dim, hidden, experts)
    operands = x, scores, ids, torch.bincount(ids.flatten(), minlength=experts)
    cells, right = [], None
    for key, (module, forward) in functions.items():
        out = forward(*operands)
        results = [out.detach(), *torch.autograd.grad(out, [x, scores], grad)]
        right = results if right is None else right
        cell = f"{key} cosine {min(cosines(results, right)):.5f}"
        if device == "cuda":
            leaves = [x, scores, *module.parameters()]
            microseconds, mib = _measured(forward, operands, leaves, grad, milliseconds)
            cell = f"{key} {microseconds:.0f} us, {mib:.0f} MiB, cosine {min(cosines(results, right)):.5f}"
        cells.append(cell)
    return f"{name}, {tokens}: {'; '.join(cells)}"


def _measured(
    forward: Callable[..., Tensor], operands: Sequence[Tensor], leaves: list[Tensor], grad: Tensor, milliseconds: int
) -> tuple[float, float]:
    from triton.testing import do_bench

    def step() -> None:
        forward(*operands).backward(grad)

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    clear()
    step()
    clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    time = do_bench(step, warmup=40, rep=milliseconds, return_mode="median", grad_to_none=leaves)
    clear()
    return float(time) * 1e3, peak


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each layer and number of tokens."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real.torchtitan_layer")
    parser.add_argument("--layers", default=",".join(DEFAULT_LAYERS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--milliseconds", type=int, default=150, help="of each timing")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(torch.cuda.get_device_name() if device == "cuda" else "no GPU: nothing is timed", "torch", torch.__version__)
    for name in options.layers.split(","):
        for tokens in map(int, options.tokens.split(",")):
            print(row(name, tokens, device, options.milliseconds), flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
