"""Fit the rule of ``precision="auto"`` to measured times of MoE layers and grouped GEMMs.

    python -m benchmarks.layer_precision          # the times that the shipped rule was fitted to
    python -m benchmarks.layer_precision FILE.csv

``fp8tune bench --op moe-layer --against none --format json`` measures layers in both precisions. Columns of the file:

    op           layer, or grouped: fp8_grouped_mm of gate and up
    precision    fp8; once, FP8 with weights quantized before; bf16
    median_us    per step, forward and backward
    host_us      least time until a step has returned to Python: it includes waits where the GPU is far behind
    graph_us     a step as a CUDA graph, which has no host time; nan after the first process
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8tune.stats.estimate import estimate, t_quantile
from fp8tune_kernels.gemm.precision import LAYER, PRODUCT, Costs, Rule, least_fp8_rows

CSV = Path(__file__).with_name("layer_precision.csv")
HOST_BOUND = 0.9  # a step waits for the host if the GPU is busy for less than this share of it
GOAL = 0.98  # share of the better precision's speed that decisions keep, as a lower bound of this confidence
CONFIDENCE = 0.95
SOFTNESS = 0.1  # share of the time in bfloat16 up to which all savings weigh alike in the fit; larger ones weigh less


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

    def relative_time(self, is_fp8: bool, share: float | None = None) -> float:
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


def least_kept(rule: Rule, results: Sequence[Case]) -> tuple[float, float, list[str]]:
    """Return the least share of the better precision's speed, its least lower bound, and lines on cases below 0.98."""
    shares, bounds, lines = [], [], []
    for case in results:
        is_fp8 = case.rows >= least_fp8_rows(rule, *case.sizes)
        shares.append(case.relative_time(is_fp8))
        bounds.append(case.relative_time(is_fp8, CONFIDENCE))
        if bounds[-1] < GOAL:
            taken = "fp8" if is_fp8 else "bf16"
            ratio = case.us_of("bf16") / case.us_of("fp8")
            sizes = f"{case.rows} rows, {case.experts} experts of {case.inputs} x {case.outputs}"
            lines.append(
                f"    {case.layer}, {sizes}: {taken}, kept {shares[-1]:.3f} (bound {bounds[-1]:.3f}); {ratio:.2f}"
            )
    return min(shares), min(bounds), lines


def report(rule: Rule, results: Sequence[Case]) -> Iterator[str]:
    """Yield lines on a rule's errors: root mean squares of the two forms, and what its decisions lose."""

    def spread(values: Sequence[float]) -> str:
        return f"{math.sqrt(statistics.fmean(value * value for value in values)):.1%}"

    of_bf16 = [rule.bf16.us(case.rows, *case.sizes) / case.bf16_us - 1 for case in results]
    of_saved = [(rule.saved.us(case.rows, *case.sizes) - case.saved_us) / case.bf16_us for case in results]
    of_bf16, of_saved = ([error for error in errors if not math.isnan(error)] for errors in (of_bf16, of_saved))
    share, bound, lines = least_kept(rule, results)
    right = sum(case.relative_time(case.rows >= least_fp8_rows(rule, *case.sizes)) >= 1 for case in results)
    yield f"{len(results)} cases: bf16 within {spread(of_bf16)}, saving within {spread(of_saved)} of bf16 (rms)"
    yield f"  the better precision in {right}; least share of its speed {share:.3f}, lower bound {bound:.3f}"
    always = {name: statistics.geometric_mean(case.us_of(name) for case in results) for name in ("fp8", "bf16")}
    taken = statistics.geometric_mean(
        case.us_of("fp8" if case.rows >= least_fp8_rows(rule, *case.sizes) else "bf16") for case in results
    )
    yield f"  speed over always bf16 {always['bf16'] / taken:.3f}, over always fp8 {always['fp8'] / taken:.3f} (means)"
    yield from lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the fitted and the shipped rule with their errors."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer_precision", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("csv", type=Path, nargs="?", default=CSV, help="measured times; without it the shipped ones")
    rows = read(parser.parse_args(arguments).csv)
    for op, shipped in (("layer", LAYER["sm_90"]), ("grouped", PRODUCT["sm_90"])):
        by_set = {name: [case for case in cases(rows, op) if case.set == name] for name in ("fit", "held-back")}
        for title, rule in (("fitted", fitted(by_set["fit"])), ("shipped", shipped)):
            print(f"{op}, {title}: {rule}")
            for name, measured in by_set.items():
                print(f"  {name}:", *report(rule, measured), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
