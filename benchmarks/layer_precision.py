"""Time MoE layers and grouped GEMMs in FP8 and in bfloat16, and fit the rule of ``precision="auto"`` to the times.

python -m benchmarks.layer_precision measure --quick              # one process for each set of layers
python -m benchmarks.layer_precision measure --processes 5        # the held-back set in five fresh processes
python -m benchmarks.layer_precision measure --layers tiny        # anywhere: without a GPU nothing is timed
python -m benchmarks.layer_precision fit CSV                      # the figures of the rule, and its errors

A step is forward and backward with gradients of all operands; of a layer, router and order of rows included. In one
process blocks of launches of all contenders alternate. Rows go to ``layer_precision.csv`` in ``$OUT``, or here:

    op           layer, or grouped: fp8_grouped_mm of gate and up
    precision    fp8; once, FP8 with weights quantized before; bf16
    median_us    of the blocks, per step
    host_us      the least time until a step has returned to Python: it includes waits where the GPU is far behind
    graph_us     a step as a CUDA graph, which has no host time; nan after the first process
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fp8tune.stats.estimate import estimate, t_quantile
from fp8tune_kernels import choose_experts, fp8_grouped_mm, moe_layer, quantize_weights
from fp8tune_kernels.gemm.precision import LAYER, PRODUCT, Costs, Rule, least_fp8_rows
from fp8tune_kernels.moe.expert_weights import quantize_down, quantize_gate_up

FILE = "layer_precision.csv"
CSV = Path(__file__).with_name(FILE)
"""Times that the shipped rule was fitted to."""
ROUNDS = 5
ROUND_US = 10_000
"""Launches of a block last about so long, but there are at most MAXIMUM_LAUNCHES."""
MAXIMUM_LAUNCHES = 6
WARM_STEPS = 4
GRAPH_REPLAYS = 9
COMPILERS = 6
"""Processes that compile kernels before any clock starts."""
HOST_BOUND = 0.9
"""A step waits for the host if the GPU is busy for less than this share of it."""
GOAL = 0.98
"""Share of the better precision's speed that decisions keep, as a lower bound of this CONFIDENCE."""
CONFIDENCE = 0.95
SOFTNESS = 0.1
"""Share of the time in bfloat16 up to which all savings weigh alike in the fit; larger ones weigh less."""


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer, and the numbers of tokens to time it with."""

    set: str
    """``fit``, ``held-back`` or ``test``."""
    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: tuple[int, ...]


def _fit(*sizes: int, tokens: tuple[int, ...]) -> Layer:
    return Layer("fit", *sizes, tokens)  # type: ignore[call-arg, arg-type]


def _held_back(*sizes: int, tokens: tuple[int, ...]) -> Layer:
    return Layer("held-back", *sizes, tokens)  # type: ignore[call-arg, arg-type]


LAYERS = {
    "tiny": Layer("test", 64, 48, 5, 3, (32,)),
    # fit
    "OLMoE": _fit(2048, 1024, 64, 8, tokens=(128, 1024, 4096, 8192, 16384)),
    "DeepSeek-MoE-16B": _fit(2048, 1408, 64, 6, tokens=(2048, 6144, 16384)),
    "Granite-1B": _fit(1024, 512, 32, 8, tokens=(1024, 4096, 8192, 16384, 65536)),
    "Mixtral-8x7B": _fit(4096, 14336, 8, 2, tokens=(1024, 2048, 4096)),
    "Kimi-K2-EP32": _fit(7168, 2048, 12, 1, tokens=(3072, 6144, 24576)),
    "Qwen3-235B-EP8": _fit(4096, 1536, 16, 1, tokens=(4096, 32768)),
    "Llama4-Scout-EP2": _fit(5120, 8192, 8, 1, tokens=(2048, 4096, 8192)),
    "Hunyuan-A13B-EP4": _fit(4096, 3072, 16, 1, tokens=(8192,)),
    "256 small": _fit(1024, 512, 256, 8, tokens=(2048, 16384, 32768)),
    "128 flat": _fit(4096, 512, 128, 4, tokens=(8192, 32768)),
    "4 with many rows": _fit(2048, 4096, 4, 1, tokens=(65536,)),
    "32 long": _fit(1536, 4096, 32, 2, tokens=(4096, 8192, 16384)),
    "top 1": _fit(3072, 1024, 128, 1, tokens=(32768,)),
    # held back
    "Qwen3-30B-A3B": _held_back(2048, 768, 128, 8, tokens=(512, 4096, 16384)),
    "gpt-oss-20b": _held_back(2880, 2880, 32, 4, tokens=(1024, 4096, 16384)),
    "Granite-3B": _held_back(1536, 512, 40, 8, tokens=(4096, 16384)),
    "Qwen3-Next-80B-EP2": _held_back(2048, 512, 256, 5, tokens=(4096, 16384)),
    "Qwen1.5-MoE-A2.7B": _held_back(2048, 1408, 60, 4, tokens=(8192,)),
    "ERNIE-4.5-21B": _held_back(2560, 1536, 64, 6, tokens=(4096,)),
    "DeepSeek-V3-EP32": _held_back(7168, 2048, 8, 1, tokens=(2048, 16384)),
    "GLM-4.5-Air-EP8": _held_back(4096, 1408, 16, 1, tokens=(16384,)),
    "Phi-3.5-MoE": _held_back(4096, 6400, 16, 2, tokens=(2048, 8192)),
    "Llama4-Scout-EP4": _held_back(5120, 8192, 4, 1, tokens=(4096,)),
    "Mixtral-8x22B-EP4": _held_back(6144, 16384, 2, 1, tokens=(2048,)),
    "Qwen2-57B-A14B-EP2": _held_back(3584, 2560, 32, 4, tokens=(4096,)),
    "Jetmoe-8B": _held_back(2048, 5632, 8, 2, tokens=(1024, 16384)),
}
"""Name -> layer. EP: the experts of one device, top 1, and the rows that tokens of all devices sent to it."""


@dataclass(frozen=True)
class Row:
    """The time of one contender on one layer in one process."""

    device: str
    set: str
    layer: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: int
    op: str
    precision: str
    process: int
    median_us: float
    host_us: float
    graph_us: float


COLUMNS = [field.name for field in fields(Row)]

Step = Callable[[], object]


# Contenders


class Operands:
    """Weights of a layer, and its steps for a number of tokens."""

    def __init__(self, layer: Layer, device: str) -> None:
        self.layer, self.device = layer, device
        self.draw = torch.Generator(device).manual_seed(0)
        E, K, N = layer.experts, layer.hidden, layer.inner
        self.router = self.normal(E, K, std=0.02).requires_grad_()
        self.w13 = self.normal(E, 2 * N, K, std=0.02).requires_grad_()
        self.w2 = self.normal(E, K, N, std=0.02).requires_grad_()

    def normal(self, *shape: int, std: float) -> Tensor:
        """Return seeded values, bfloat16."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=self.draw).mul_(std)

    def layer_steps(self, tokens: int) -> dict[str, Step]:
        """Return precision -> a step of ``moe_layer`` with its router."""
        K = self.layer.hidden
        x, grad = self.normal(tokens, K, std=0.2).requires_grad_(), self.normal(tokens, K, std=0.2)
        once = quantize_gate_up(self.w13), quantize_down(self.w2)

        def step(w13: Any, w2: Any, precision: str) -> None:
            ids, weights = choose_experts(functional.linear(x, self.router), self.layer.top_k)
            out = moe_layer(x, w13, w2, ids, weights, precision=precision)
            torch.autograd.grad(out, (x, self.router, self.w13, self.w2), grad)

        return {
            "fp8": lambda: step(self.w13, self.w2, "fp8"),
            "bf16": lambda: step(self.w13, self.w2, "bf16"),
            "once": lambda: step(*once, "fp8"),
        }

    def grouped_steps(self, tokens: int) -> dict[str, Step]:
        """Return precision -> a step of ``fp8_grouped_mm`` of gate and up, of rows in even groups."""
        layer, rows = self.layer, tokens * self.layer.top_k
        A = self.normal(rows, layer.hidden, std=0.2).requires_grad_()
        grad = self.normal(rows, 2 * layer.inner, std=0.2)
        ends = [rows * (e + 1) // layer.experts for e in range(layer.experts)]
        offs = torch.tensor(ends, device=self.device, dtype=torch.int32)
        with torch.no_grad():
            once = quantize_weights(self.w13)

        def step(B_t: Any, precision: str) -> None:
            out = fp8_grouped_mm(A, B_t, offs, precision=precision)
            torch.autograd.grad(out, (A, self.w13), grad)

        return {
            "fp8": lambda: step(self.w13.mT, "fp8"),
            "bf16": lambda: step(self.w13.mT, "bf16"),
            "once": lambda: step(once, "fp8"),
        }


# Measuring


def times_us(steps: dict[str, Step]) -> dict[str, tuple[list[float], float]]:
    """Return name -> microseconds per step of each round, and the least host time. Blocks alternate."""

    def clock() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    launches = {}
    for name, step in steps.items():
        step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(WARM_STEPS):
            step()
        torch.cuda.synchronize()
        step_us = (time.perf_counter() - started) / WARM_STEPS * 1e6
        launches[name] = max(1, min(MAXIMUM_LAUNCHES, round(ROUND_US / step_us)))
    rounds: dict[str, list[tuple[Any, Any, float]]] = {name: [] for name in steps}
    for turn in range(ROUNDS):
        names = list(steps) if turn % 2 == 0 else list(steps)[::-1]
        for name in names:
            begin, started = clock(), time.perf_counter()
            for _ in range(launches[name]):
                steps[name]()
            host_us = (time.perf_counter() - started) / launches[name] * 1e6
            rounds[name].append((begin, clock(), host_us))
    torch.cuda.synchronize()
    return {
        name: (
            [begin.elapsed_time(end) * 1e3 / launches[name] for begin, end, _ in blocks],
            min(host_us for _, _, host_us in blocks),
        )
        for name, blocks in rounds.items()
    }


def graph_us(step: Step) -> float:
    """Return the median microseconds of a step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's accumulators are made on the stream that is captured
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(GRAPH_REPLAYS + 1)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(float(begin.elapsed_time(end)) * 1e3 for begin, end in itertools.pairwise(events))


def measure_layer(name: str, device: str, process: int, compiles_only: bool) -> Iterator[Row]:
    """Yield rows of a layer; without a GPU, or to compile only, run each step once and yield none."""
    layer = LAYERS[name]
    operands = Operands(layer, device)
    name_of_device = torch.cuda.get_device_name() if device == "cuda" else device
    sizes = layer.hidden, layer.inner, layer.experts, layer.top_k
    for tokens in layer.tokens:
        for op, make in (("layer", operands.layer_steps), ("grouped", operands.grouped_steps)):
            steps = make(tokens)
            if device != "cuda" or compiles_only:
                for step in steps.values():
                    step()
                continue
            for precision, (rounds, host_us) in times_us(steps).items():
                median_us = round(statistics.median(rounds), 1)
                in_graph_us = round(graph_us(steps[precision]), 1) if process == 0 else math.nan
                of = name_of_device, layer.set, name, *sizes, tokens, op, precision, process
                yield Row(*of, median_us, round(host_us, 1), in_graph_us)
            del steps


def measure(names: Sequence[str], process: int, path: Path, until: float, compiles_only: bool) -> int:
    """Append rows of layers to a file until a time; return the number of layers that failed."""
    device, failed = "cuda" if torch.cuda.is_available() else "cpu", 0
    for name in names:
        if time.time() > until:
            print(f"process {process}: no time left for {name}", flush=True)
            return failed
        started = time.time()
        try:
            rows = list(measure_layer(name, device, process, compiles_only))
        except Exception as error:
            failed += 1
            print(f"process {process}: {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            rows = []
        if rows:
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(COLUMNS)
                writer.writerows(astuple(row) for row in rows)
            print(f"process {process}: {name}, {time.time() - started:.0f} s", flush=True)
            for op in ("layer", "grouped"):
                for tokens in LAYERS[name].tokens:
                    of = {row.precision: row for row in rows if (row.op, row.tokens) == (op, tokens)}
                    shown = (f" {key} {row.median_us:.0f} ({row.graph_us:.0f})" for key, row in of.items())
                    print(f"  {op:8s}{tokens:7d} ", *shown, flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    return failed


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    numbers = {"hidden", "inner", "experts", "top_k", "tokens", "process"}
    times = {"median_us", "host_us", "graph_us"}
    values: list[dict[str, Any]] = [
        {
            name: int(text) if name in numbers else float(text or "nan") if name in times else text
            for name, text in line.items()
        }
        for line in lines
    ]
    return [Row(**value) for value in values]


# Fitting


@dataclass(frozen=True)
class Case:
    """One step in both precisions."""

    layer: str
    set: str
    rows: int
    inputs: int
    outputs: int
    experts: int
    us: Mapping[str, tuple[float, ...]]
    """Precision -> time in each process."""
    graph_us: Mapping[str, float]
    host_us: Mapping[str, float]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Inputs, outputs and experts."""
        return self.inputs, self.outputs, self.experts

    def us_of(self, precision: str) -> float:
        """Return the median time of a precision."""
        return statistics.median(self.us[precision])

    def gpu_us(self, precision: str) -> float:
        """Return the time on the GPU: of the graph; without one, of a step that does not wait for the host, or nan."""
        if precision in self.graph_us:
            return self.graph_us[precision]
        return self.us_of(precision) if self.host_us[precision] < HOST_BOUND * self.us_of(precision) else math.nan

    @property
    def bf16_us(self) -> float:
        """Microseconds on the GPU in bfloat16."""
        return self.gpu_us("bf16")

    @property
    def saved_us(self) -> float:
        """Microseconds on the GPU that FP8 saves."""
        return self.bf16_us - self.gpu_us("fp8")

    @property
    def predictors(self) -> tuple[float, float, float]:
        """Sizes that costs are multiplied with."""
        products = self.inputs * self.outputs
        return self.rows * products / 1e9, self.rows * self.inputs / 1e6, self.experts * products / 1e6

    def kept(self, is_fp8: bool, share: float | None = None) -> float:
        """Return the time of the better precision over that of one: the mean, or its lower confidence bound."""
        better = min(("fp8", "bf16"), key=self.us_of)
        ratios = [a / b for a, b in zip(self.us[better], self.us["fp8" if is_fp8 else "bf16"], strict=True)]
        if share is None or len(ratios) < 2:
            return statistics.fmean(ratios)
        return estimate(ratios).mean - t_quantile(share, len(ratios) - 1) * estimate(ratios).error


def cases(rows: Iterable[Row], op: str) -> list[Case]:
    """Return the cases of an operation."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row.op == op:
            groups.setdefault((row.layer, row.tokens), []).append(row)
    result = []
    for (layer, tokens), group in groups.items():
        first = group[0]
        names = dict.fromkeys(row.precision for row in group)
        result.append(
            Case(
                layer=layer,
                set=first.set,
                rows=tokens * first.top_k,
                inputs=first.hidden,
                outputs=first.inner if op == "layer" else 2 * first.inner,
                experts=first.experts,
                us={name: tuple(row.median_us for row in group if row.precision == name) for name in names},
                graph_us={row.precision: row.graph_us for row in group if not math.isnan(row.graph_us)},
                host_us={name: min(row.host_us for row in group if row.precision == name) for name in names},
            )
        )
    return result


def fitted(fit: Sequence[Case]) -> Rule:
    """Fit a rule by least squares of errors as shares of the time in bfloat16; of the saving where it is small."""

    def costs(value_of: Callable[[Case], float], softness: float) -> Costs:
        known = [case for case in fit if not math.isnan(value_of(case))]
        weights = np.array([1 / case.bf16_us / (abs(value_of(case)) / case.bf16_us + softness) for case in known])
        matrix = np.array([case.predictors for case in known]) * weights[:, None]
        values = np.array([value_of(case) for case in known]) * weights
        return Costs(*(round(float(cost), 3) for cost in np.linalg.lstsq(matrix, values)[0]))

    launch_us = round(statistics.median(case.host_us["fp8"] for case in fit))
    return Rule(costs(lambda case: case.bf16_us, 1.0), costs(lambda case: case.saved_us, SOFTNESS), launch_us)


def least_kept(rule: Rule, found: Sequence[Case]) -> tuple[float, float, list[str]]:
    """Return the least share of the better precision's speed, its least lower bound, and lines on cases below 0.98."""
    shares, bounds, lines = [], [], []
    for case in found:
        is_fp8 = case.rows >= least_fp8_rows(rule, *case.sizes)
        shares.append(case.kept(is_fp8))
        bounds.append(case.kept(is_fp8, CONFIDENCE))
        if bounds[-1] < GOAL:
            taken = "fp8" if is_fp8 else "bf16"
            ratio = case.us_of("bf16") / case.us_of("fp8")
            sizes = f"{case.rows} rows, {case.experts} experts of {case.inputs} x {case.outputs}"
            lines.append(
                f"    {case.layer}, {sizes}: {taken}, kept {shares[-1]:.3f} (bound {bounds[-1]:.3f}); {ratio:.2f}"
            )
    return min(shares), min(bounds), lines


def report(rule: Rule, found: Sequence[Case]) -> Iterator[str]:
    """Yield lines on a rule's errors: root mean squares of the two forms, and what its decisions lose."""

    def spread(values: Sequence[float]) -> str:
        return f"{math.sqrt(statistics.fmean(value * value for value in values)):.1%}"

    of_bf16 = [rule.bf16.us(case.rows, *case.sizes) / case.bf16_us - 1 for case in found]
    of_saved = [(rule.saved.us(case.rows, *case.sizes) - case.saved_us) / case.bf16_us for case in found]
    of_bf16, of_saved = ([error for error in errors if not math.isnan(error)] for errors in (of_bf16, of_saved))
    share, bound, lines = least_kept(rule, found)
    right = sum(case.kept(case.rows >= least_fp8_rows(rule, *case.sizes)) >= 1 for case in found)
    yield f"{len(found)} cases: bf16 within {spread(of_bf16)}, saving within {spread(of_saved)} of bf16 (rms)"
    yield f"  the better precision in {right}; least share of its speed {share:.3f}, lower bound {bound:.3f}"
    always = {name: statistics.geometric_mean(case.us_of(name) for case in found) for name in ("fp8", "bf16")}
    taken = statistics.geometric_mean(
        case.us_of("fp8" if case.rows >= least_fp8_rows(rule, *case.sizes) else "bf16") for case in found
    )
    yield f"  speed over always bf16 {always['bf16'] / taken:.3f}, over always fp8 {always['fp8'] / taken:.3f} (means)"
    yield from lines


# Commands


def _main_measure(options: argparse.Namespace) -> int:
    path, until = Path(os.environ.get("OUT", ".")) / FILE, time.time() + options.seconds
    chosen = options.layers.split(",") if options.layers else [name for name in LAYERS if LAYERS[name].set != "test"]
    if options.child is not None:
        return measure(chosen, options.child, path, options.until, options.compile_only)
    if not torch.cuda.is_available():
        print("no GPU: nothing is timed")
        return measure(chosen, 0, path, until, compiles_only=True)
    command = [sys.executable, "-m", "benchmarks.layer_precision", "measure", "--until", str(until)]
    parts = [",".join(chosen[start::COMPILERS]) for start in range(min(COMPILERS, len(chosen)))]
    compilers = [subprocess.Popen([*command, "--child", "0", "--compile-only", "--layers", part]) for part in parts]
    for compiler in compilers:  # what does not fit beside others is compiled when it is measured
        compiler.wait()
    print(f"compiled with {until - time.time():.0f} s left", flush=True)
    held_back = [name for name in chosen if LAYERS[name].set == "held-back"]
    failed = 0
    for process in range(1 if options.quick else options.processes):
        layers = ",".join(held_back if process else [*(name for name in chosen if name not in held_back), *held_back])
        if layers:
            failed += subprocess.run([*command, "--child", str(process), "--layers", layers], check=False).returncode
    return int(failed > 0)


def _main_fit(options: argparse.Namespace) -> int:
    rows = read(options.csv)
    for op, shipped in (("layer", LAYER["sm_90"]), ("grouped", PRODUCT["sm_90"])):
        by_set = {name: [case for case in cases(rows, op) if case.set == name] for name in ("fit", "held-back")}
        rule = fitted(by_set["fit"])
        for title, each in (("fitted", rule), ("shipped", shipped)):
            print(f"{op}, {title}: {each}")
            for name, found in by_set.items():
                print(f"  {name}:", *report(each, found), sep="\n  ")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 1 if a layer failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer_precision", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("measure", help="time layers on the GPU")
    command.add_argument("--layers", default="", help=f"of {', '.join(LAYERS)}; without it all but tiny")
    command.add_argument("--quick", action="store_true", help="time each layer in one process")
    command.add_argument("--processes", type=int, default=5, help="fresh processes for the held-back layers")
    command.add_argument("--seconds", type=float, default=350, help="no layer is begun later")
    command.add_argument("--child", type=int, help=argparse.SUPPRESS)
    command.add_argument("--until", type=float, help=argparse.SUPPRESS)
    command.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    command.set_defaults(run=_main_measure)
    command = commands.add_parser("fit", help="fit the rule to the times of a file, and print its errors")
    command.add_argument(
        "csv", type=Path, nargs="?", default=CSV, help="what measure wrote; without it the shipped one"
    )
    command.set_defaults(run=_main_fit)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
