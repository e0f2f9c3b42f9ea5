"""Steps of models of transformers with their experts in bfloat16 and by each of fp8tune's implementations.

    python benchmarks/real/transformers_steps.py                    on a GPU: two layers of real sizes
    python benchmarks/real/transformers_steps.py --small            on a CPU: small ones, no times

A step is forward and backward of ``micro-batches`` batches, gradients accumulated, without the optimizer; times are
medians per micro-batch. The vocabulary is short, so that layers are what is timed. All implementations start from the
same weights and tokens. Differences from bfloat16 (``grouped_mm`` of transformers): of the loss, of the logits
(relative, in the norm), and the cosine between gradients, of all parameters and the least of any expert weight's.
``replayed_cosine`` is that least with the experts of each token as bfloat16 chose them; ``routed_alike`` the share of
choices that are the same without.

``eager`` is bfloat16 too: what another order of sums does. So is ``permuted``: our forward pass with torch's GEMMs.
``gemms`` is that with ``fp8_grouped_mm``, in place of the layer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fp8tune_kernels.gemm.passes import add_bias
from fp8tune_kernels.transformers_experts import forward, register, weights_once

BF16, PERMUTED, GEMMS = "grouped_mm", "permuted", "gemms"
OURS = (GEMMS, "fp8tune", "fp8tune-auto")
ONCE = "-once"  # ends the label of an implementation that is measured with weights quantized once
IMPLEMENTATIONS = (BF16, PERMUTED, *OURS, *(f"{name}{ONCE}" for name in OURS))

COMMON = {"num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 4096, "eos_token_id": None}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
# Class in transformers -> names of four of its sizes: of an expert, experts, experts per token, and of a head.
NAMES = {
    "Qwen3Moe": ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "head_dim"),
    "Mixtral": ("intermediate_size", "num_local_experts", "num_experts_per_tok", ""),
    "GptOss": ("intermediate_size", "num_local_experts", "num_experts_per_tok", "head_dim"),
    "Olmoe": ("intermediate_size", "num_experts", "num_experts_per_tok", ""),
}
# Class, hidden size, heads, key and value heads, then the sizes above; and those of a small model.
MODELS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "qwen3-moe": ("Qwen3Moe", (2048, 32, 4, 768, 128, 8, 128), (48, 8, 8, 16)),
    "mixtral": ("Mixtral", (4096, 32, 8, 14336, 8, 2, 0), (96, 4, 2, 0)),
    "gpt-oss-20b": ("GptOss", (2880, 64, 8, 2880, 32, 4, 64), (64, 8, 4, 16)),
    "olmoe": ("Olmoe", (2048, 16, 16, 1024, 64, 8, 0), (48, 8, 8, 0)),
    "gpt-oss-120b": ("GptOss", (2880, 64, 8, 2880, 128, 4, 64), (64, 8, 4, 16)),
}
SEQUENCE = 512  # tokens per sequence of gpt-oss: transformers has its attention in eager mode, and scores would be most

COLUMNS = {
    "median_ms": ".2f",
    "over_bf16": ".2f",
    "loss_difference": "+.5f",
    "logits_error": ".4f",
    "gradient_cosine": ".5f",
    "expert_cosine": ".5f",
    "replayed_cosine": ".5f",
    "routed_alike": ".4f",
    "peak_gib": ".1f",
}


def in_bfloat16(rows: Tensor, B_t: Tensor, offs: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
    """Multiply with torch's GEMM what ``fp8_grouped_mm`` is called for."""
    out = torch._grouped_mm(rows, B_t, offs=offs)
    return out if bias is None else add_bias(out, bias, offs)


def permuted(*operands: Any) -> Tensor:
    """Our forward pass in bfloat16."""
    with mock.patch.object(forward, "fp8_grouped_mm", in_bfloat16):
        return forward.experts_forward(*operands, options=forward.Options(is_layer=False))


ALL_EXPERTS_FUNCTIONS.register(PERMUTED, permuted)
register(GEMMS, forward.Options(is_layer=False))


def implemented(model: Any, label: str) -> contextlib.AbstractContextManager[None]:
    """Set the implementation that a label names; return what to put around the micro-batches of a step."""
    model.set_experts_implementation(label.removesuffix(ONCE))
    return weights_once(model) if label.endswith(ONCE) else contextlib.nullcontext()


def made(name: str, device: str, small: bool) -> Any:
    """Return a model in bfloat16. The spread of weights lets experts matter beside the residual stream."""
    import transformers

    kind, sizes, few = MODELS[name]
    expert_names = NAMES[kind]
    config = {
        **COMMON,
        **dict(zip([*SMALL][:3], sizes, strict=False)),
        **dict(zip(expert_names, sizes[3:], strict=True)),
    }
    if small:
        config |= {**SMALL, **dict(zip(expert_names, few, strict=True))}
    config.pop("", None)
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if label.endswith("proj_bias"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 3:
                fan_in = parameter.shape[1 if "gpt" in name else 2]
                parameter.normal_(0, fan_in**-0.5)
            elif parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    return model.train()


def chunks(a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two sets of tensors in float32, a quarter of a GiB at a time."""
    for x, y in zip(a, b, strict=True):
        for left, right in zip(x.reshape(-1).split(2**26), y.reshape(-1).split(2**26), strict=True):
            yield left.float(), right.float()


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the cosine between two sets of tensors."""
    products = [(torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)) for x, y in chunks(a, b)]
    dot, first, second = torch.tensor(products, dtype=torch.float64).sum(0).tolist()
    return float(dot / (first * second) ** 0.5)


def error(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the norm of the difference over that of ``b``."""
    squares = [((x - y).square().sum(), y.square().sum()) for x, y in chunks(a, b)]
    differing, whole = torch.tensor(squares, dtype=torch.float64).sum(0).tolist()
    return float((differing / whole) ** 0.5)


class Step(NamedTuple):
    """Results of one step of a model."""

    loss: float
    logits: Tensor
    gradients: list[Tensor]
    of_experts: list[Tensor]
    routing: list[tuple[Tensor, Tensor]]
    """Experts that each layer chose, and their weights."""


def rerouted(index: Tensor, weights: Tensor, chosen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return other experts for the tokens, each with the weight that it has here or, where it has none, had there."""
    second, weights_there = chosen
    matches = second.unsqueeze(2) == index.unsqueeze(1)
    here = (matches * weights.unsqueeze(1)).sum(2)
    return second, torch.where(matches.any(2), here, weights_there).to(weights.dtype)


class Differences:
    """Loss, logits and gradients of bfloat16, and how far others are from them."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.right = self._step(BF16)

    def _step(self, implementation: str, routing: list[tuple[Tensor, Tensor]] | None = None) -> Step:
        """Run a step with the experts that routers choose, or with those of ``routing``."""
        chosen: list[tuple[Tensor, Tensor]] = []

        def choose(_: Any, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden, index, weights = operands
            chosen.append((index, weights.detach()))
            if routing is not None:
                index, weights = rerouted(index, weights, routing[len(chosen) - 1])
            return hidden, index, weights

        modules = [module for module in self.model.modules() if hasattr(module, "is_transposed")]
        hooks = [module.register_forward_pre_hook(choose) for module in modules]
        self.model.zero_grad(set_to_none=True)
        with implemented(self.model, implementation):
            out = self.model(input_ids=self.ids, labels=self.ids)
            out.loss.backward()
        for hook in hooks:
            hook.remove()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        of_experts = [gradient for gradient in gradients if gradient.dim() == 3]
        self.model.zero_grad(set_to_none=True)
        return Step(out.loss.item(), out.logits.detach(), gradients, of_experts, chosen)

    def measures(self, implementation: str) -> dict[str, float]:
        """Return the measures of the table."""
        results, right = self._step(implementation), self.right
        pairs = zip(results.routing, right.routing, strict=True)
        alike = [(a.unsqueeze(2) == b.unsqueeze(1)).any(2) for (a, _), (b, _) in pairs]
        measures = {
            "loss_difference": results.loss - right.loss,
            "logits_error": error([results.logits], [right.logits]),
            "gradient_error": error(results.gradients, right.gradients),
            "gradient_cosine": cosine(results.gradients, right.gradients),
            "expert_cosine": self._least(results),
            "routed_alike": float(torch.stack(alike).float().mean()),
        }
        del results
        return {**measures, "replayed_cosine": self._least(self._step(implementation, right.routing))}

    def _least(self, results: Step) -> float:
        return min(cosine([a], [b]) for a, b in zip(results.of_experts, self.right.of_experts, strict=True))


def step_ms(
    model: Any, ids: Tensor, implementations: Sequence[str], micro: int, rounds: int, *, is_compiled: bool
) -> dict[str, list[float]]:
    """Return the times of a step per micro-batch, of implementations in turn."""
    times: dict[str, list[float]] = {name: [] for name in implementations}
    calls = {name: torch.compile(model, dynamic=False) if is_compiled else model for name in implementations}
    for turn in range(-1, rounds):
        for name, call in calls.items():
            block = implemented(call, name)
            model.zero_grad(set_to_none=True)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            with block:
                for _ in range(micro):
                    call(input_ids=ids, labels=ids).loss.backward()
            end.record()
            torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(begin.elapsed_time(end) / micro)
    return times


def peak_gib(model: Any, ids: Tensor, implementation: str) -> float:
    """Return the most memory that a forward and backward pass allocates past parameters and gradients."""
    with implemented(model, implementation):
        model(input_ids=ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids).loss.backward()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(name: str, tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one model with so many tokens."""
    device = "cpu" if options.small else "cuda"
    model = made(name, device, options.small)
    length = min(tokens, SEQUENCE if name.startswith("gpt") else 4096)
    ids = torch.randint(model.config.vocab_size, (tokens // length, length), device=device)
    measured: dict[str, dict[str, float]] = {name: {} for name in options.implementations}
    if not options.times_only:
        differences = Differences(model, ids)
        for second in ("eager", *options.implementations):
            measured[second] = differences.measures(second) if second != BF16 else {}
        del differences
    times: dict[str, list[float]] = {}
    if not options.small:
        timed = options.implementations
        times = step_ms(model, ids, timed, options.micro_batches, options.rounds, is_compiled=options.compiled)
    rows = []
    for second, differing in measured.items():
        row: dict[str, Any] = {"model": name, "tokens": tokens, "implementation": second, **differing}
        if second in times:
            row["median_ms"] = statistics.median(times[second])
            row["spread_ms"] = max(times[second]) - min(times[second])
            row["over_bf16"] = statistics.median(times[BF16]) / row["median_ms"]
            row["peak_gib"] = peak_gib(model, ids, second)
        rows.append(row)
    return rows


def main() -> None:
    """Print rows as they are measured, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times-only", action="store_true", help="measure no differences from bfloat16")
    parser.add_argument("--compiled", action="store_true", help="time models that torch.compile returns")
    parser.add_argument("--small", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--json", type=Path, default=Path("transformers.json"), help="where the rows go")
    options = parser.parse_args()
    import transformers

    device = "CPU" if options.small else torch.cuda.get_device_name()
    head = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    print(head, " ".join(("model", "tokens", "implementation", *COLUMNS)), sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    for tokens in [64] if options.small else options.tokens:
        for name in options.models:
            for row in measure(name, tokens, options):
                cells = [format(row[column], form) if column in row else "-" for column, form in COLUMNS.items()]
                print(f"{name:12} {tokens:6} {row['implementation']:18}", *(f"{cell:>9}" for cell in cells), flush=True)
                rows.append(row)
            options.json.write_text(json.dumps({**head, "rows": rows}, indent=1))
            gc.collect()
            if not options.small:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
