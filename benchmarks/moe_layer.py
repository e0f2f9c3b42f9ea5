"""Time whole MoE layers beside each other: torch's in bfloat16, ``fp8_moe_mlp``, ``moe_layer``, and SonicMoE.

python -m benchmarks.moe_layer                                # three models at 4,096 and 16,384 tokens
python -m benchmarks.moe_layer --layers OLMoE --tokens 4096   # one of them
python -m benchmarks.moe_layer --compiled                     # also moe_layer as torch.compile returns it
python -m benchmarks.moe_layer --sonic                        # beside SonicMoE, if it is installed
python -m benchmarks.moe_layer --layers tiny --tokens 64      # anywhere: without a GPU nothing is timed

Router and order of rows included, forward and backward, gradients of input, router and both weights. Per contender:

    step       median us of a step, do_bench (the L2 cache is cleared)
    x torch    torch's step over it
    forward    median us of the forward pass
    graph      median us of a step as a CUDA graph
    host       median us until a step has returned to Python, on an idle GPU
    peak       MiB of a step, beside parameters and inputs
    cosines    to torch's bfloat16 layer: output, gradients of x, router, w13, w2; with the same experts
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fp8tune_kernels import choose_experts, fp8_moe_mlp, moe_layer, quantize_weights
from fp8tune_kernels.moe.expert_weights import quantize_down, quantize_gate_up

LAYERS = {
    "OLMoE": (2048, 1024, 64, 8),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-MoE-16B": (2048, 1408, 64, 6),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "Qwen3-235B-A22B-EP8": (4096, 1536, 16, 8),
    "Granite-3.1-3B-A800M": (1536, 512, 40, 8),
    "GLM-4.5-Air": (4096, 1408, 128, 8),
    "Qwen3-Next-80B-A3B": (2048, 512, 512, 10),
    "tiny": (64, 48, 5, 3),
}
"""Name -> hidden size, size of an expert, experts, experts a token."""

DEFAULT_LAYERS = ("OLMoE", "Qwen3-30B-A3B", "DeepSeek-MoE-16B")
TOKENS = (4096, 16384)
TORCH = "torch bf16"
HOST_RUNS = 25

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits -> ids and weights, (T, top_k)."""


@dataclass(frozen=True)
class Layer:
    """One layer's operands."""

    x: Tensor
    router: Tensor
    w13: Tensor
    w2: Tensor
    grad: Tensor
    top_k: int

    @property
    def leaves(self) -> list[Tensor]:
        """Return the tensors that get gradients."""
        return [self.x, self.router, self.w13, self.w2]


@dataclass
class Result:
    """Figures of one contender; None without a GPU, or where it could not be measured."""

    name: str
    step_us: float | None = None
    forward_us: float | None = None
    graph_us: float | None = None
    host_us: float | None = None
    peak_mib: float | None = None
    cosines: list[float] = field(default_factory=list)
    error: str = ""


def random_layer(name: str, tokens: int, device: str) -> Layer:
    """Return seeded operands of one of LAYERS."""
    hidden, inner, experts, top_k = LAYERS[name]
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, device=device, generator=draw).mul_(std).bfloat16()

    x, router = normal(tokens, hidden, std=0.2), normal(experts, hidden, std=0.02)
    w13, w2 = normal(experts, 2 * inner, hidden, std=0.02), normal(experts, hidden, inner, std=0.02)
    for leaf in (x, router, w13, w2):
        leaf.requires_grad_()
    return Layer(x, router, w13, w2, normal(tokens, hidden, std=0.2), top_k)


# Contenders: layer and route -> output


def torch_route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose experts by torch's operations."""
    values, ids = logits.topk(top_k, dim=-1)
    return ids, values.float().softmax(-1)


class _Permute(torch.autograd.Function):
    """Rows of tokens in the order of their experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return grad[place].view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    """Rows in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[place]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


_permute: Callable[..., Tensor] = _Permute.apply
unpermute: Callable[..., Tensor] = _Unpermute.apply


def ordered(x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, their groups' ends, their order and its inverse, by torch's operations."""
    expert_of_row, order = torch.sort(ids.reshape(-1), stable=True)
    number = torch.arange(experts, device=ids.device, dtype=expert_of_row.dtype)
    offs = torch.searchsorted(expert_of_row, number, right=True, out_int32=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return _permute(x, order, place, ids.shape[1]), offs, order, place


def routed(layer: Layer, route: Route | None) -> tuple[Tensor, Tensor]:
    """Return ids and weights of the router, by torch's operations."""
    logits = functional.linear(layer.x, layer.router)
    return torch_route(logits, layer.top_k) if route is None else route(logits)


def _swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, 1)
    return functional.silu(gate) * up


_compiled_swiglu = torch.compile(_swiglu, dynamic=True)


def grouped(rows: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Multiply rows by the weights of their experts; by a loop without a GPU."""
    if rows.is_cuda:
        return torch._grouped_mm(rows, w.transpose(1, 2), offs=offs)
    starts = [0, *offs.tolist()]
    parts = [rows[start:end] @ w[e].t() for e, (start, end) in enumerate(itertools.pairwise(starts))]
    return torch.cat(parts)


def torch_layer(layer: Layer, route: Route | None = None) -> Tensor:
    """Run torch's grouped GEMMs in bfloat16."""
    ids, weights = routed(layer, route)
    rows, offs, order, place = ordered(layer.x, ids, layer.router.shape[0])
    swiglu = _compiled_swiglu if rows.is_cuda else _swiglu
    out = grouped(swiglu(grouped(rows, layer.w13, offs)), layer.w2, offs)
    out = unpermute(out, order, place).view(-1, layer.top_k, out.shape[1])
    return (out * weights.to(out.dtype).unsqueeze(-1)).sum(1)


def mlp(x: Tensor, w13: Any, w2: Any, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Run ``fp8_moe_mlp`` on rows that torch orders."""
    rows, offs, order, place = ordered(x, ids, experts)
    out = fp8_moe_mlp(rows, w13, w2, offs, row_weights=unpermute(weights.reshape(-1), place, order))
    return unpermute(out, order, place).view(*ids.shape, out.shape[1]).sum(1)


def mlp_layer(layer: Layer, route: Route | None = None, once: tuple[Any, Any] | None = None) -> Tensor:
    """Run :func:`mlp` with torch's router."""
    ids, weights = routed(layer, route)
    w13, w2 = once or (layer.w13, layer.w2)
    return mlp(layer.x, w13, w2, ids, weights, layer.router.shape[0])


def our_layer(
    layer: Layer, route: Route | None = None, once: tuple[Any, Any] | None = None, precision: str = "fp8"
) -> Tensor:
    """Run ``choose_experts`` and ``moe_layer``."""
    logits = functional.linear(layer.x, layer.router)
    ids, weights = choose_experts(logits, layer.top_k) if route is None else route(logits)
    w13, w2 = once or (layer.w13, layer.w2)
    return moe_layer(layer.x, w13, w2, ids, weights, precision=precision)


def sonic_layer() -> Callable[[Layer, Route | None], Tensor]:
    """Import SonicMoE and return its layer, which chooses its experts itself. Its GEMMs take their default configs."""
    from sonicmoe import moe_TC_softmax_topk_layer  # type: ignore[import-not-found]
    from sonicmoe.enums import ActivationType  # type: ignore[import-not-found]
    from sonicmoe.functional import backward, forward  # type: ignore[import-not-found]

    for module in (forward, backward):  # their own tuning takes minutes for each number of tokens
        for name in ("gemm", "gemm_gated", "gemm_dgated", "gemm_act", "gemm_dact"):
            if hasattr(module, name):
                setattr(module, name, functools.partial(getattr(module, name), tuned=False))

    def call(layer: Layer, route: Route | None = None) -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        w13, w2 = layer.w13.permute(1, 2, 0), layer.w2.permute(1, 2, 0)  # it takes gate and up interleaved: same work
        operands = (layer.x, layer.router, w13, None, w2, None, layer.top_k, stream, ActivationType.SWIGLU, False)
        out: Tensor = moe_TC_softmax_topk_layer(*operands)[0]
        return out

    return call


def contenders(layer: Layer, *, with_sonic: bool, with_compiled: bool) -> dict[str, Callable[..., Tensor]]:
    """Return name -> function of a layer and a route, torch's first."""
    with torch.no_grad():
        mlp_once = quantize_weights(layer.w13, recipe="folded"), quantize_weights(layer.w2, recipe="folded")
    once = quantize_gate_up(layer.w13), quantize_down(layer.w2)
    functions: dict[str, Callable[..., Tensor]] = {
        TORCH: torch_layer,
        "fp8_moe_mlp": mlp_layer,
        "fp8_moe_mlp, once": lambda layer, route=None: mlp_layer(layer, route, mlp_once),
        "moe_layer": our_layer,
        "moe_layer, once": lambda layer, route=None: our_layer(layer, route, once),
        "moe_layer, bf16": lambda layer, route=None: our_layer(layer, route, precision="bf16"),
    }
    if with_compiled:
        torch._dynamo.reset()  # each layer is compiled for its own sizes
        functions["moe_layer, compiled"] = torch.compile(our_layer, fullgraph=True, dynamic=False)
    if with_sonic:
        functions["SonicMoE"] = sonic_layer()
    return functions


# Measuring


def gradients(layer: Layer, call: Callable[..., Tensor]) -> list[Tensor]:
    """Return the output and all gradients, with the experts that torch chooses."""
    with torch.no_grad():
        ids, _ = torch_route(functional.linear(layer.x, layer.router), layer.top_k)

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        return ids, logits.gather(1, ids).float().softmax(-1)

    out = call(layer, route)
    return [out.detach(), *torch.autograd.grad(out, layer.leaves, layer.grad)]


def cosines(mine: Sequence[Tensor], others: Sequence[Tensor]) -> list[float]:
    """Return the cosine of each pair."""
    pairs = zip(mine, others, strict=True)
    return [functional.cosine_similarity(a.flatten().float(), b.flatten().float(), 0).item() for a, b in pairs]


def measure(layer: Layer, result: Result, call: Callable[..., Tensor], milliseconds: int) -> None:
    """Fill in times and peak memory on the GPU."""
    from triton.testing import do_bench

    def step() -> None:
        call(layer).backward(layer.grad)

    def clear() -> None:
        for leaf in layer.leaves:
            leaf.grad = None

    def median_us(function: Callable[[], object]) -> float:
        milliseconds_ = do_bench(function, warmup=40, rep=milliseconds, return_mode="median", grad_to_none=layer.leaves)
        return float(milliseconds_) * 1e3

    for _ in range(2):  # compiles
        clear()
        step()
    clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    result.peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    result.step_us, result.forward_us = median_us(step), median_us(lambda: call(layer))
    times = []
    for _ in range(HOST_RUNS):
        clear()
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    result.host_us = statistics.median(times) * 1e6
    clear()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's accumulators are made on the stream that is captured
        step()
        clear()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            step()
        result.graph_us = float(do_bench(graph.replay, warmup=40, rep=milliseconds, return_mode="median")) * 1e3
    finally:
        clear()
        del graph


def compare(
    name: str, tokens: int, device: str, milliseconds: int, *, with_sonic: bool = False, with_compiled: bool = False
) -> list[Result]:
    """Check and time all contenders on one layer. A contender that fails has its error."""
    layer = random_layer(name, tokens, device)
    results, right = [], None
    for key, call in contenders(layer, with_sonic=with_sonic, with_compiled=with_compiled).items():
        result = Result(key)
        results.append(result)
        try:
            if key != "SonicMoE":
                outputs = gradients(layer, call)
                right = outputs if right is None else right
                result.cosines = cosines(outputs, right)
                del outputs
            if device == "cuda":
                measure(layer, result, call, milliseconds)
        except Exception as error:
            result.error = f"{type(error).__name__}: {str(error)[:300]}"
    return results


def table(results: Sequence[Result]) -> str:
    """Return the results as lines."""
    base = results[0].step_us
    lines = [
        f"  {'':20s}{'step':>9s}{'x torch':>9s}{'forward':>9s}{'graph':>9s}{'host':>8s}{'peak':>8s}"
        "  cosines: out, x, router, w13, w2"
    ]
    for result in results:
        times = (result.step_us, result.forward_us, result.graph_us, result.host_us, result.peak_mib)
        step, forward, graph, host, peak = ("-" if value is None else f"{value:.0f}" for value in times)
        ratio = "-" if base is None or result.step_us is None else f"{base / result.step_us:.2f}"
        near = " ".join(f"{value:.5f}" for value in result.cosines)
        lines.append(f"  {result.name:20s}{step:>9s}{ratio:>9s}{forward:>9s}{graph:>9s}{host:>8s}{peak:>8s}  {near}")
        if result.error:
            lines.append(f"      {result.error}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table per layer; return 1 if a contender failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe_layer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", default=",".join(DEFAULT_LAYERS), help=f"of {', '.join(LAYERS)}; or all")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers, separated by commas")
    parser.add_argument("--compiled", action="store_true", help="time moe_layer compiled by torch.compile too")
    parser.add_argument("--sonic", action="store_true", help="time SonicMoE, which has to be installed")
    parser.add_argument("--milliseconds", type=int, default=150, help="of each timing")
    options = parser.parse_args(arguments)
    names = [name for name in LAYERS if name != "tiny"] if options.layers == "all" else options.layers.split(",")
    if unknown := [name for name in names if name not in LAYERS]:
        parser.error(f"--layers must be of {', '.join(LAYERS)}, got {unknown[0]!r}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(torch.cuda.get_device_name() if device == "cuda" else "no GPU: nothing is timed", "torch", torch.__version__)
    failed = False
    for name in names:
        for tokens in map(int, options.tokens.split(",")):
            hidden, inner, experts, top_k = LAYERS[name]
            print(f"\n{name}: {tokens} tokens, hidden {hidden}, expert {inner}, {experts} experts, top {top_k}")
            wanted = {"with_sonic": options.sonic, "with_compiled": options.compiled}
            results = compare(name, tokens, device, options.milliseconds, **wanted)
            print(table(results), flush=True)
            failed |= any(result.error for result in results)
            if device == "cuda":
                torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
