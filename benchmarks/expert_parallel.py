"""Time ``expert_parallel_moe`` beside torch's bf16 ``_grouped_mm`` with bf16 all-to-all, forward and backward.

torchrun --nproc-per-node 2 -m benchmarks.expert_parallel --seconds 200 --out results

A rank prints for each layer and contender the median step of the slowest rank, the bytes that a rank sends in a step,
and its peak memory. It first compares Qwen3's results with those of one GPU. ``OUT`` gets rows in JSON.
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

from benchmarks.layers import Layer, compiled, swiglu, torch_mlp
from fp8tune_kernels import ExpertGroup, choose_experts, expert_parallel_moe
from fp8tune_kernels.moe import expert_parallel
from fp8tune_kernels.moe.permutation import scatter, sort_rows


class Sizes(NamedTuple):
    """Sizes of a layer that all ranks share."""

    hidden: int
    expert: int
    experts: int
    top_k: int


LAYERS = {
    "Qwen3-30B-A3B": Sizes(2048, 768, 128, 8),
    "DeepSeek-V3": Sizes(7168, 2048, 256, 8),
    "tiny": Sizes(48, 32, 8, 2),
}
TOKENS = (4096, 16384)
ROUNDS = 15


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


def operands(sizes: Sizes, tokens: int, device: torch.device, rank: int) -> Layer:
    """Return the operands of one rank; the router is that of all."""
    ranks, draw = dist.get_world_size(), torch.Generator(device)

    def normal(seed: int, *shape: int, std: float) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=draw.manual_seed(seed))

    x, grad = (normal(2 * rank + place, tokens, sizes.hidden, std=0.2) for place in (10, 11))
    router = normal(1, sizes.experts, sizes.hidden, std=0.02)
    w13 = normal(100 + rank, sizes.experts // ranks, 2 * sizes.expert, sizes.hidden, std=0.02)
    w2 = normal(200 + rank, sizes.experts // ranks, sizes.hidden, sizes.expert, std=0.02)
    for leaf in (x, router, w13, w2):
        leaf.requires_grad_()
    return Layer(x, router, w13, w2, grad, sizes.top_k)


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


def measured(name: str, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each contender, whose steps take turns."""
    own = operands(LAYERS[name], tokens, device, dist.get_rank())
    steps = {label: own.call(forward).step for label, forward in CONTENDERS.items()}
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


def checked(sizes: Sizes, tokens: int, device: torch.device) -> list[str]:
    """Return lines that compare this rank's results with those of one device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = [operands(sizes, tokens, device, number) for number in range(ranks)]
    x, _, w13, w2, grad = (torch.cat(parts) for parts in zip(*(layer[:5] for layer in own), strict=True))
    right = Layer(x, own[0].router, w13, w2, grad, sizes.top_k).our_call().step()
    lines = []
    exact: dict[str, Any] = {"fp8tune, float32 sums": functools.partial(our_layer, sums=torch.float32)}
    for label, forward in (exact | CONTENDERS).items():
        results, texts = own[rank].call(forward).step(), []
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write rows until the time is over."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="benchmarks.expert_parallel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=tuple(LAYERS), default=list(LAYERS)[:2])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of a rank")
    parser.add_argument("--seconds", type=float, default=230, help="begin no layer after so long")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of rows")
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
            results = measured(layer, tokens, device)
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
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
