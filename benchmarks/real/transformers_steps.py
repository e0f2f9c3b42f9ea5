"""Steps of models of transformers with their experts in bfloat16 and by each of fp8tune's implementations.

    python benchmarks/real/transformers_steps.py                    on a GPU: two layers of real sizes
    python benchmarks/real/transformers_steps.py --small            on a CPU: small ones, no times

A step is forward and backward of ``micro-batches`` batches, gradients accumulated, without the optimizer; times are
medians per micro-batch. The vocabulary is short, so that layers are what is timed. All implementations start from the
same weights and tokens. Differences from bfloat16 (``grouped_mm`` of transformers): of the loss, of the logits
(relative, in the norm), and the cosine between gradients, of all parameters and the least of any expert weight's.
``cos-rep`` is that least with the experts of each token as bfloat16 chose them; ``alike`` the part of choices that are
the same without.

``eager`` is bfloat16 too: what another order of sums does. So is ``permuted``: our forward pass with torch's GEMMs.
``gemms`` is that with ``fp8_grouped_mm``, in place of the layer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fp8tune_kernels.gemm.passes import add_bias
from fp8tune_kernels.transformers_experts import forward, register, weights_once

Sizes = dict[str, Any]

ATTENTION: Sizes = {"num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 4096, "eos_token_id": None}

SMALL: Sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}

BF16 = "grouped_mm"

PERMUTED = "permuted"

GEMMS = "gemms"

OURS = (GEMMS, "fp8tune", "fp8tune-auto")

ONCE = "-once"
"""Ends the label of an implementation that is measured with weights quantized once."""

IMPLEMENTATIONS = (BF16, PERMUTED, *OURS, *(f"{name}{ONCE}" for name in OURS))

ROW = "{:<12} {:>6} {:<19} {:>7} {:>6} {:>9} {:>7} {:>8} {:>8} {:>8} {:>7} {:>5}"


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


def qwen3_moe(small: bool) -> Any:
    """Qwen3-30B-A3B."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: Sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts: Sizes = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    if small:
        sizes, experts = {**SMALL, "head_dim": 16}, {"moe_intermediate_size": 48, "num_experts": 8}
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**ATTENTION, **sizes, **experts})


def mixtral(small: bool) -> Any:
    """Mixtral 8x7B."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: Sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    experts: Sizes = {"intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
    if small:
        sizes, experts = SMALL, {"intermediate_size": 96, "num_local_experts": 4}
    return MixtralForCausalLM, MixtralConfig(**{**ATTENTION, **sizes, **experts})


def gpt_oss(small: bool, experts: int = 32) -> Any:
    """gpt-oss 20B; 120B has 128 experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes: Sizes = {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    sizes |= {"intermediate_size": 2880, "num_local_experts": experts, "num_experts_per_tok": 4}
    if small:
        sizes = {**SMALL, "head_dim": 16, "intermediate_size": 64, "num_local_experts": 8}
    return GptOssForCausalLM, GptOssConfig(**{**ATTENTION, **sizes})


def olmoe(small: bool) -> Any:
    """OLMoE 1B-7B."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes: Sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}
    experts: Sizes = {"intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
    if small:
        sizes, experts = SMALL, {"intermediate_size": 48, "num_experts": 8}
    return OlmoeForCausalLM, OlmoeConfig(**{**ATTENTION, **sizes, **experts})


MODELS: dict[str, Callable[[bool], Any]] = {
    "qwen3-moe": qwen3_moe,
    "mixtral": mixtral,
    "gpt-oss-20b": gpt_oss,
    "olmoe": olmoe,
    "gpt-oss-120b": lambda small: gpt_oss(small, 128),
}

SEQUENCE = {"gpt-oss-20b": 512, "gpt-oss-120b": 512}
"""Tokens a sequence: transformers has their attention, with sinks, in eager mode, and scores of 4096 would be most."""


def made(name: str, device: str, small: bool) -> Any:
    """The model in bfloat16. Weights are of a spread that lets experts matter beside the residual stream."""
    model_class, config = MODELS[name](small)
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = model_class(config)
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


def expert_weights(model: Any) -> list[Tensor]:
    """The parameters that an implementation multiplies."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 3]


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Between two sets of tensors: products in float32, of a quarter of a GiB at a time, their sums in float64."""
    sums = torch.zeros(3, dtype=torch.float64, device=a[0].device)
    for x, y in zip(a, b, strict=True):
        for left, right in zip(x.reshape(-1).split(2**26), y.reshape(-1).split(2**26), strict=True):
            left, right = left.float(), right.float()
            pairs = (left, right), (left, left), (right, right)
            sums += torch.stack([torch.dot(value, second).double() for value, second in pairs])
    dot, *squares = sums.tolist()
    return float(dot / (squares[0] * squares[1]) ** 0.5)


def error(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The norm of the difference over that of ``b``."""
    squares = torch.zeros(2, dtype=torch.float64, device=b[0].device)
    for x, y in zip(a, b, strict=True):
        for left, right in zip(x.reshape(-1).split(2**26), y.reshape(-1).split(2**26), strict=True):
            left, right = left.float(), right.float()
            squares += torch.stack([(left - right).square().sum(), right.square().sum()])
    differing, whole = squares.tolist()
    return float((differing / whole) ** 0.5)


class Found(NamedTuple):
    """Results of one step of a model."""

    loss: float
    logits: Tensor
    gradients: list[Tensor]
    of_experts: list[Tensor]
    routing: list[tuple[Tensor, Tensor]]
    """Of each layer the chosen experts, and their weights."""


def rerouted(index: Tensor, weights: Tensor, chosen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Other experts for the tokens, each with the weight that it has here or, where it has none, had there."""
    second, weights_there = chosen
    matches = second.unsqueeze(2) == index.unsqueeze(1)
    here = (matches * weights.unsqueeze(1)).sum(2)
    return second, torch.where(matches.any(2), here, weights_there).to(weights.dtype)


class Differences:
    """Loss, logits and gradients of bfloat16, and how far others are from them."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.right = self._step(BF16)

    def _step(self, implementation: str, routing: list[tuple[Tensor, Tensor]] | None = None) -> Found:
        """By the experts that routers choose, or by given ones."""
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
        of_experts = [p.grad for p in expert_weights(self.model) if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return Found(out.loss.item(), out.logits.detach(), gradients, of_experts, chosen)

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

    def _least(self, results: Found) -> float:
        return min(cosine([a], [b]) for a, b in zip(results.of_experts, self.right.of_experts, strict=True))


def tried(model: Any, ids: Tensor, implementation: str) -> dict[str, float]:
    """Nothing is measured. Raises ValueError for an implementation that does not take the model."""
    with implemented(model, implementation), torch.no_grad():
        model(input_ids=ids)
    return {}


def step_ms(
    model: Any, ids: Tensor, implementations: Sequence[str], micro: int, rounds: int, *, is_compiled: bool
) -> dict[str, list[float]]:
    """Times of a step a micro-batch, of implementations in turn."""
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
    """The most memory that a forward and backward pass allocates past parameters and gradients."""
    with implemented(model, implementation):
        model(input_ids=ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids).loss.backward()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(name: str, tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model with so many tokens."""
    model = made(name, options.device, options.small)
    length = min(tokens, SEQUENCE.get(name, 4096))
    ids = torch.randint(model.config.vocab_size, (tokens // length, length), device=options.device)
    differences = None if options.times_only else Differences(model, ids)
    measured: dict[str, dict[str, float]] = {BF16: {}}
    others = [name for name in options.implementations if name != BF16]
    for second in others if differences is None else ("eager", *others):
        try:
            measured[second] = tried(model, ids, second) if differences is None else differences.measures(second)
        except ValueError as refusal:
            print(f"{name}: {second}: {refusal}")
    del differences
    timed = [second for second in options.implementations if second in measured]
    times: dict[str, list[float]] = {}
    if options.device != "cpu":
        micro, rounds = options.micro_batches, options.rounds
        times = step_ms(model, ids, timed, micro, rounds, is_compiled=options.compiled)
    rows = []
    for second, differing in measured.items():
        row: dict[str, Any] = {"model": name, "tokens": tokens, "implementation": second, **differing}
        if times.get(second):
            row["median_ms"] = statistics.median(times[second])
            row["spread_ms"] = max(times[second]) - min(times[second])
            row["over_bf16"] = statistics.median(times[BF16]) / row["median_ms"]
            row["peak_gib"] = peak_gib(model, ids, second)
        rows.append(row)
    return rows


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""

    def cell(name: str, form: str) -> str:
        return format(row[name], form) if name in row else "-"

    return ROW.format(
        row["model"],
        row["tokens"],
        row["implementation"],
        cell("median_ms", ".2f"),
        cell("over_bf16", ".2f"),
        cell("loss_difference", "+.5f"),
        cell("logits_error", ".4f"),
        cell("gradient_cosine", ".5f"),
        cell("expert_cosine", ".5f"),
        cell("replayed_cosine", ".5f"),
        cell("routed_alike", ".4f"),
        cell("peak_gib", ".1f"),
    )


def main() -> int:
    """Prints a row as it is measured. Exit code 1 where a model failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times-only", action="store_true", help="measure no differences from bfloat16")
    parser.add_argument("--compiled", action="store_true", help="time models that torch.compile returns")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after so long")
    parser.add_argument("--small", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--json", help="write the rows here too")
    options = parser.parse_args()
    options.device = "cpu" if options.small else "cuda"
    began, failed, rows = time.monotonic(), 0, []
    import transformers

    where = "CPU" if options.small else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}")
    head = {"device": where, "torch": torch.__version__, "transformers": transformers.__version__}
    heads = ["model", "tokens", "experts", "ms", "x-bf16", "loss-diff", "logits"]
    heads += ["cos-all", "cos-exp", "cos-rep", "alike", "GiB"]
    print(ROW.format(*heads), flush=True)
    for tokens in [64] if options.small else options.tokens:
        for name in options.models:
            if time.monotonic() - began > options.seconds:
                print(f"{name} {tokens}: no time left")
                continue
            try:
                for row in measure(name, tokens, options):
                    rows.append(row)
                    print(shown(row), flush=True)
                if options.json:
                    Path(options.json).write_text(json.dumps({**head, "rows": rows}, indent=1))
            except Exception:
                failed += 1
                traceback.print_exc(limit=4, file=sys.stdout)
                print(f"{name} {tokens}: failed", flush=True)
            gc.collect()
            if not options.small:
                torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
