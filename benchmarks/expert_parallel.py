"""Time ``expert_parallel_moe`` beside torch's bf16 ``_grouped_mm`` with bf16 all-to-all, forward and backward.

torchrun --nproc-per-node 2 -m benchmarks.expert_parallel --seconds 200 --out results

A rank prints for each layer and contender the median step of the slowest rank, the bytes that a rank sends in a step,
and its peak memory. It first compares Qwen3's results with those of one GPU. ``OUT`` gets rows in JSON and a picture of
one step of rank 0.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.layers import compiled, swiglu, torch_mlp
from fp8tune_kernels import ExpertGroup, choose_experts, expert_parallel_moe, moe_layer
from fp8tune_kernels.moe import expert_parallel
from fp8tune_kernels.moe.permutation import scatter, sort_rows


class Layer(NamedTuple):
    """Sizes of a layer that all ranks share."""

    hidden: int
    expert: int
    experts: int
    top_k: int


LAYERS = {
    "Qwen3-30B-A3B": Layer(2048, 768, 128, 8),
    "DeepSeek-V3": Layer(7168, 2048, 256, 8),
    "tiny": Layer(48, 32, 8, 2),
}
TOKENS = (4096, 16384)
ROUNDS = 15


class Operands(NamedTuple):
    """Operands of one rank."""

    x: Tensor
    router: Tensor
    w13: Tensor
    w2: Tensor
    grad: Tensor


# The baseline: rows in bfloat16, splits on the host


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        return _exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grad.contiguous(), ctx.received, ctx.sent), None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, received, sent)
    return out


_all_to_all: Callable[..., Tensor] = _AllToAll.apply


def torch_layer(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor, top_k: int) -> Tensor:
    """Run the layer by torch's operations, as torchtitan does."""
    ranks, experts, local = dist.get_world_size(), router.shape[0], w13.shape[0]
    values, ids = functional.linear(x, router).topk(top_k, dim=-1)
    rows, _, order, place = sort_rows(x, ids, experts)
    counts = torch.histc(ids.float(), bins=experts, min=0, max=experts).int()
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    to_ranks, from_ranks = torch.stack([counts, received]).view(2, ranks, local).sum(2).tolist()
    rows = _all_to_all(rows, to_ranks, from_ranks)
    expert = torch.arange(local, dtype=torch.uint8, device=x.device).repeat(ranks)
    by_expert = expert.repeat_interleave(received, output_size=sum(from_ranks)).sort(stable=True).indices
    inverse = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert), device=x.device))
    offs = received.view(ranks, local).sum(0).cumsum(0, dtype=torch.int32)
    out = torch_mlp(scatter(rows, inverse, by_expert), w13, w2, offs, compiled(swiglu) if x.is_cuda else swiglu)
    out = _all_to_all(scatter(out, by_expert, inverse), from_ranks, to_ranks)
    out = scatter(out, order, place).view(-1, top_k, x.shape[1])
    return (out * values.float().softmax(-1).to(out.dtype).unsqueeze(-1)).sum(1)


def our_layer(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor, top_k: int, **settings: Any) -> Tensor:
    """Run the layer by ``expert_parallel_moe``."""
    choice = choose_experts(functional.linear(x, router), top_k)
    return expert_parallel_moe(x, w13, w2, *choice, ExpertGroup(dist.group.WORLD, **settings))  # type: ignore[arg-type]


CONTENDERS: dict[str, Callable[..., Tensor]] = {
    "torch bf16": torch_layer,
    "fp8tune": our_layer,
    "fp8tune, rows counted": functools.partial(our_layer, counts_rows=True),
    "fp8tune, capacity 1.25": functools.partial(our_layer, capacity=1.25),
}


def operands(layer: Layer, tokens: int, device: torch.device, rank: int) -> Operands:
    """Return the operands of one rank; the router is that of all."""
    ranks, draw = dist.get_world_size(), torch.Generator(device)

    def normal(seed: int, *shape: int, std: float) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=draw.manual_seed(seed))

    x, grad = (normal(2 * rank + place, tokens, layer.hidden, std=0.2) for place in (10, 11))
    w13 = normal(100 + rank, layer.experts // ranks, 2 * layer.expert, layer.hidden, std=0.02)
    w2 = normal(200 + rank, layer.experts // ranks, layer.hidden, layer.expert, std=0.02)
    return Operands(x, normal(1, layer.experts, layer.hidden, std=0.02), w13, w2, grad)


def step(forward: Callable[..., Tensor], own: Operands, top_k: int) -> list[Tensor]:
    """Return the output, and the gradients of all operands."""
    leaves = [leaf.requires_grad_() for leaf in own[:4]]
    out = forward(*leaves, top_k)
    return [out.detach(), *torch.autograd.grad(out, leaves, own.grad)]


# What is measured


class Sent:
    """Count of the bytes that this rank sends to others."""

    def __enter__(self) -> Sent:
        self.total, self.calls = 0, (dist.all_to_all_single, expert_parallel._all_gather)

        def all_to_all(out: Tensor, rows: Tensor, received: Any = None, sent: Any = None, **options: Any) -> Any:
            ranks, rank = dist.get_world_size(), dist.get_rank()
            share = len(rows) // ranks if sent is None else sent[rank]
            self.total += rows.nbytes * (len(rows) - share) // max(len(rows), 1)
            return self.calls[0](out, rows, received, sent, **options)

        def all_gather(out: Tensor, rows: Tensor, **options: Any) -> Any:
            self.total += rows.nbytes * (dist.get_world_size() - 1)
            return self.calls[1](out, rows, **options)

        setattr(dist, "all_to_all_single", all_to_all)  # noqa: B010
        expert_parallel._all_gather = all_gather
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, expert_parallel._all_gather = self.calls


def step_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of one step, which begins when all ranks are ready."""
    dist.barrier()
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def slowest(value: float, device: torch.device, least: bool = False) -> float:
    """Return the largest value of all ranks, or the least."""
    result = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(result, op=dist.ReduceOp.MIN if least else dist.ReduceOp.MAX)
    return result.item()


def measured(name: str, layer: Layer, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each contender, whose steps take turns."""
    own = operands(layer, tokens, device, dist.get_rank())
    steps: dict[str, Any] = {
        label: functools.partial(step, call, own, layer.top_k) for label, call in CONTENDERS.items()
    }
    rows = list[dict[str, Any]]()
    for label, run in steps.items():
        with Sent() as sent:
            run()
        run()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        row = {"layer": name, "ranks": dist.get_world_size(), "tokens": tokens, "contender": label}
        rows.append({**row, "sent_bytes": slowest(sent.total, device), "peak_bytes": slowest(peak, device)})
    times: dict[Any, list[float]] = {label: [] for label in steps}
    for _ in range(ROUNDS):
        for label, run in steps.items():
            times[label].append(step_ms(run, device))
    for row in rows:
        row["median_ms"] = slowest(statistics.median(times[row["contender"]]), device)
    return rows


def checked(layer: Layer, tokens: int, device: torch.device) -> list[str]:
    """Return lines that compare this rank's results with those of one device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = [operands(layer, tokens, device, number) for number in range(ranks)]
    whole = Operands(*(torch.cat(parts) for parts in zip(*own, strict=True)))._replace(router=own[0].router)

    def alone(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor, top_k: int) -> Tensor:
        return moe_layer(x, w13, w2, *choose_experts(functional.linear(x, router), top_k))

    right = step(alone, whole, layer.top_k)
    lines = []
    exact: dict[str, Any] = {"fp8tune, float32 sums": functools.partial(our_layer, sums=torch.float32)}
    for label, call in (exact | CONTENDERS).items():
        results, texts = step(call, own[rank], layer.top_k), []
        for part, result, expected in zip(("out", "x", "router", "w13", "w2"), results, right, strict=True):
            if part == "router":  # each rank has the gradient of its tokens
                dist.all_reduce(result)
            else:
                expected = expected.chunk(ranks)[rank]
            same = torch.equal(result, expected)
            cosine = functional.cosine_similarity(result.double().flatten(), expected.double().flatten(), 0).item()
            texts.append(f"{part} {'equal' if same else f'{cosine:.6f}'}")
        lines.append(f"{label}: {', '.join(texts)}")
    return lines


def picture(layer: Layer, tokens: int, device: torch.device) -> str:
    """Return an SVG of one step: kernels of the layer above, transfers below."""
    own = operands(layer, tokens, device, dist.get_rank())
    run = functools.partial(step, CONTENDERS["fp8tune, rows counted"], own, layer.top_k)
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        run()  # the first waits for the profiler
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if "CUDA" in str(event.device_type)
    )
    starts = [start for start, _, name in events if "choose_kernel" in name]
    events = [event for event in events if event[0] >= starts[-1]]
    begin, end = events[0][0], max(event[1] for event in events)
    scale, shapes = 1000 / (end - begin), []
    colors = {"nccl": "#d62728", "gathered_rows": "#1f77b4", "grouped": "#1f77b4", "transpose": "#2ca02c"}
    for start, stop, name in events:
        color = next((color for part, color in colors.items() if part in name), "#7f7f7f")
        y, width = (70 if "nccl" in name else 30), max((stop - start) * scale, 0.3)
        title = f"<title>{name[:60].replace('<', ' ').replace('&', ' ')}: {stop - start:.0f} us</title>"
        place = f'x="{(start - begin) * scale:.1f}" y="{y}" width="{width:.1f}" height="30"'
        shapes.append(f'<rect {place} fill="{color}">{title}</rect>')
    text = f"one step of rank 0, {end - begin:.0f} us: GEMMs blue, transposes green, other kernels grey, transfers red"
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 110" font-family="sans-serif" font-size="14">'
    return "\n".join([head, f'<text x="0" y="18">{text}</text>', *shapes, "</svg>\n"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write rows until the time is over."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="benchmarks.expert_parallel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=tuple(LAYERS), default=list(LAYERS)[:2])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of a rank")
    parser.add_argument("--seconds", type=float, default=230, help="begin no layer after so long")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of rows and picture")
    options = parser.parse_args(arguments)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    ranks, rows = dist.get_world_size(), list[dict[str, Any]]()

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    def has_time() -> bool:
        return slowest(options.seconds - time.monotonic() + started, device, least=True) > 0

    name_of_gpu = torch.cuda.get_device_name() if is_gpu else "CPU"
    say(f"{ranks} x {name_of_gpu}, torch {torch.__version__}")
    first = options.layers[0]
    for line in checked(LAYERS[first], options.tokens[0], device):
        say(f"beside one device, {first}, {options.tokens[0]} tokens: {line}")
    for layer in options.layers:
        for tokens in options.tokens:
            if not has_time():
                say(f"{layer}, {tokens} tokens: left out")
                continue
            results = measured(layer, LAYERS[layer], tokens, device)
            rows += results
            base = results[0]
            for row in results:
                shares = [row[key] / max(base[key], 1) for key in ("sent_bytes", "peak_bytes")]
                speedup = base["median_ms"] / row["median_ms"]
                say(
                    f"{layer}, {tokens} tokens, {row['contender']:22s} {row['median_ms']:8.3f} ms ({speedup:.2f}x), "
                    f"sent {row['sent_bytes'] / 1e6:7.1f} MB ({shares[0]:.3f}), "
                    f"peak {row['peak_bytes'] / 2**20:7.0f} MiB ({shares[1]:.2f})"
                )
            if dist.get_rank() == 0:
                (options.out / f"expert-parallel-{ranks}.json").write_text(json.dumps(rows, indent=1))
    if is_gpu and has_time():
        svg = picture(LAYERS[first], options.tokens[-1], device)
        if dist.get_rank() == 0:
            (options.out / f"expert-parallel-{ranks}.svg").write_text(svg)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
