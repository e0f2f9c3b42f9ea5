"""Fit the rule of ``precision="auto"`` to measured times of MoE layers and grouped GEMMs.

    python -m benchmarks.layer_precision          # the times that the shipped rule was fitted to
    python -m benchmarks.layer_precision FILE.csv

``python -m benchmarks.layers moe-layer`` measures layers in both precisions. Columns of the file:

    op           layer, or grouped: fp8_grouped_mm of gate and up
    precision    fp8; once, FP8 with weights quantized before; bf16
    median_us    per step, forward and backward
    host_us      least time until a step has returned to Python: it includes waits where the GPU is far behind
    graph_us     a step as a CUDA graph, which has no host time; empty after the first process
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import gmean

from fp8tune.stats.estimate import estimate, t_quantile
from fp8tune_kernels.gemm.precision import LAYER, PRODUCT, Costs, Rule, least_fp8_rows

CSV = Path(__file__).with_name("layer_precision.csv")
HOST_BOUND = 0.9  # a step waits for the host if the GPU is busy for less than this share of it
GOAL = 0.98  # share of the better precision's speed that decisions keep, as a lower bound of this confidence
CONFIDENCE = 0.95
SOFTNESS = 0.1  # share of the time in bfloat16 up to which all savings weigh alike in the fit; larger ones weigh less
SIZES = ["inputs", "outputs", "experts"]


def cases(path: Path, op: str) -> pd.DataFrame:
    """Return a row for each step of an operation, with its times in both precisions.

    ``fp8`` and ``bf16`` are medians over processes, ``fp8_gpu`` and ``bf16_gpu`` times on the GPU: of the graph;
    without one, of a step that does not wait for the host. ``kept`` and ``bound`` are the share of the speed that the
    slower precision keeps, and its lower confidence bound.
    """
    result = []
    frame = pd.read_csv(path)
    for (layer, tokens), group in frame[frame["op"] == op].groupby(["layer", "tokens"], sort=False):
        first, by_precision = group.iloc[0], group.groupby("precision")
        times = group.pivot(index="process", columns="precision", values="median_us")
        us, graph_us, host_us = times.median(), by_precision["graph_us"].max(), by_precision["host_us"].min()
        gpu_us = graph_us.fillna(us.where(host_us < HOST_BOUND * us))
        better, worse = us[["fp8", "bf16"]].sort_values(kind="stable").index
        ratios = times[better] / times[worse]
        share = bound = ratios.mean()
        if len(ratios) > 1:
            bound -= t_quantile(CONFIDENCE, len(ratios) - 1) * estimate([*ratios]).error
        result.append(
            {
                "layer": layer,
                "set": first["set"],
                "rows": tokens * first["top_k"],
                "inputs": first["hidden"],
                "outputs": first["inner"] if op == "layer" else 2 * first["inner"],
                "experts": first["experts"],
                "fp8": us["fp8"],
                "bf16": us["bf16"],
                "fp8_gpu": gpu_us["fp8"],
                "bf16_gpu": gpu_us["bf16"],
                "host": host_us["fp8"],
                "kept": share,
                "bound": bound,
            }
        )
    return pd.DataFrame(result)


def fitted(steps: pd.DataFrame) -> Rule:
    """Fit a rule by least squares of errors as shares of the time in bfloat16; of the saving where it is small."""
    products = steps["inputs"] * steps["outputs"]
    sizes = (steps["rows"] * products / 1e9, steps["rows"] * steps["inputs"] / 1e6, steps["experts"] * products / 1e6)
    predictors = np.column_stack(sizes)

    def costs(values: pd.Series[float], softness: float) -> Costs:
        known = values.notna()
        weights = 1 / (values.abs() + softness * steps["bf16_gpu"])[known].to_numpy()
        matrix, weighted = predictors[known] * weights[:, None], values[known].to_numpy() * weights
        return Costs(*(round(float(cost), 3) for cost in np.linalg.lstsq(matrix, weighted)[0]))

    saved = costs(steps["bf16_gpu"] - steps["fp8_gpu"], SOFTNESS)
    return Rule(costs(steps["bf16_gpu"], 1.0), saved, round(steps["host"].median()))


def decided(rule: Rule, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steps with what a rule decides, and the share of the better precision's speed that this keeps."""
    least = [least_fp8_rows(rule, *map(int, sizes)) for sizes in steps[SIZES].to_numpy()]
    is_fp8 = steps["rows"] >= least
    is_better = is_fp8 == (steps["fp8"] <= steps["bf16"])
    shares = steps[["kept", "bound"]].where(~is_better, 1.0)
    return steps.assign(taken=np.where(is_fp8, "fp8", "bf16"), kept=shares["kept"], bound=shares["bound"])


def report(rule: Rule, steps: pd.DataFrame) -> Iterator[str]:
    """Yield lines on a rule's errors: root mean squares of the two forms, and what its decisions lose."""
    steps = decided(rule, steps)
    arguments = steps[["rows", *SIZES]].to_numpy()
    of_bf16, of_saved = (np.array([costs.us(*row) for row in arguments]) for costs in (rule.bf16, rule.saved))
    errors = of_bf16 / steps["bf16_gpu"] - 1, (of_saved - steps["bf16_gpu"] + steps["fp8_gpu"]) / steps["bf16_gpu"]
    bf16, saved = (np.sqrt((error**2).mean()) for error in errors)
    taken_us = gmean(steps["fp8"].where(steps["taken"] == "fp8", steps["bf16"]))
    gains = [gmean(steps[name]) / taken_us for name in ("bf16", "fp8")]
    right = (steps["kept"] >= 1).sum()
    yield f"{len(steps)} cases: bf16 within {bf16:.1%}, saving within {saved:.1%} of bf16 (rms)"
    least = f"least share of its speed {steps['kept'].min():.3f}, lower bound {steps['bound'].min():.3f}"
    yield f"  the better precision in {right}; {least}"
    yield f"  speed over always bf16 {gains[0]:.3f}, over always fp8 {gains[1]:.3f} (means)"
    for row in steps[steps["bound"] < GOAL].itertuples():
        sizes = f"{row.rows} rows, {row.experts} experts of {row.inputs} x {row.outputs}"
        yield f"    {row.layer}, {sizes}: {row.taken}, kept {row.kept:.3f} (bound {row.bound:.3f})"


def main(path: Path = CSV) -> None:
    """Print the fitted and the shipped rule with their errors."""
    for op, shipped in (("layer", LAYER["sm_90"]), ("grouped", PRODUCT["sm_90"])):
        steps = cases(path, op)
        for title, rule in (("fitted", fitted(steps[steps["set"] == "fit"])), ("shipped", shipped)):
            print(f"{op}, {title}: {rule}")
            for name, group in steps.groupby("set"):
                print(f"  {name}:", *report(rule, group), sep="\n  ")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
