"""Summary of the runs of a comparison: a table of the losses at the end, beside the spread of bf16.

python -m benchmarks.training.summary losses    # of docs/results/data/training.json
python -m benchmarks.training.summary in-bf16   # of the same weights, multiplied in bf16
python -m benchmarks.training.summary speeds
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["REFERENCE", "Line", "lines", "losses_of", "speeds_table", "table"]

PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "data" / "training.json"

REFERENCE = "bf16"
"""The arm that others are compared with."""


@dataclass(frozen=True)
class Line:
    """An arm: the loss on held-out texts over seeds, in nats a token, and its differences from bf16 seed by seed."""

    arm: str
    seeds: int
    mean: float
    spread: float
    difference: float
    spread_of_differences: float
    is_within: bool
    """Whether the mean is as near to that of bf16 as bf16's seeds are to each other: one standard deviation."""


def losses_of(runs: Sequence[Mapping[str, Any]], name: str = "held_out") -> dict[str, dict[int, float]]:
    """[arm][seed] -> the loss of that name."""
    results: dict[str, dict[int, float]] = {}
    for run in runs:
        results.setdefault(run["arm"], {})[run["seed"]] = run[name]
    return results


def lines(held_out: Mapping[str, Mapping[int, float]]) -> list[Line]:
    """One line an arm, of ``held_out[arm][seed]``. Differences are over the seeds that bf16 has too."""
    reference = held_out[REFERENCE]
    allowed = _spread(list(reference.values()))
    results = []
    for arm, by_seed in held_out.items():
        differences = [loss - reference[seed] for seed, loss in by_seed.items() if seed in reference]
        values = list(by_seed.values())
        mean = statistics.fmean(values)
        difference = statistics.fmean(differences)
        is_within = abs(difference) <= allowed
        results.append(Line(arm, len(values), mean, _spread(values), difference, _spread(differences), is_within))
    return results


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table(results: Sequence[Line], floor: float) -> str:
    """Markdown."""
    rows = [
        "| arm | seeds | loss | over the floor | standard deviation | less bf16, seed by seed | within the spread |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for line in results:
        less = "" if line.arm == REFERENCE else f"{line.difference:+.4f} ± {line.spread_of_differences:.4f}"
        verdict = "" if line.arm == REFERENCE or line.seeds < 2 else ("yes" if line.is_within else "no")
        rows.append(
            f"| {line.arm} | {line.seeds} | {line.mean:.4f} | {line.mean - floor:.4f} | {line.spread:.4f} "
            f"| {less} | {verdict} |"
        )
    return "\n".join(rows)


def speeds_table(speeds: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown, of what :func:`benchmarks.training.run.measured` found for each arm."""
    rows = [
        "| arm | a step as a CUDA graph, ms | launched from the host, ms | peak memory, MiB |",
        "|---|---:|---:|---:|",
    ]
    for arm, results in speeds.items():
        rows.append(f"| {arm} | {results['graph_ms']:.2f} | {results['eager_ms']:.1f} | {results['peak_mib']:,.0f} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    """Prints the tables of these names."""
    document = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    for name in arguments:
        if name == "speeds":
            print(speeds_table(document["speeds"]))
        else:
            print(table(lines(losses_of(document["runs"])), document["floor"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
