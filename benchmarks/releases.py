"""Speed per release, from the rows that each had: ``docs/results/data/releases.csv``.

python -m benchmarks.releases                 # the table of docs/results/releases.md
python -m benchmarks.releases --add 0.4.0     # before a release: adds the measured picks of results.db
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

import fp8tune

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "docs" / "results" / "data" / "releases.csv"
SIZE = ["kernel", "gpu", "size", "attributes"]
"""Columns that say what was timed."""


def add(version: str) -> None:
    """Append the times of the picks in results.db. Raises ValueError if the file has that version."""
    earlier = pd.read_csv(TIMES)
    if version in set(earlier["version"]):
        raise ValueError(f"{TIMES} has {version}: delete its rows first")
    picks = fp8tune.open(str(ROOT / "results.db")).picks()
    gpu = picks["device"].str.extract(r"(H\d+)", expand=False)
    rows = picks.assign(version=version, gpu=gpu)[picks["kind"] == "measured"][[*earlier.columns]]
    pd.concat([earlier, rows.round({"time_us": 2})]).to_csv(TIMES, index=False)


def lines(times: pd.DataFrame) -> Iterator[str]:
    """Yield the rows of the table: each release beside the one before it, on the sizes of both."""
    yield "| release | GPU | kernels | sizes | sizes of both | speedup |"
    yield "|---|---|---:|---:|---:|---:|"
    for gpu, of_gpu in times.groupby("gpu"):
        releases = [(version, rows.set_index(SIZE)["time_us"]) for version, rows in of_gpu.groupby("version")]
        for (_, before), (version, now) in itertools.pairwise([("", releases[0][1][:0]), *releases]):
            ratios = (before / now).dropna()
            kernels = now.index.get_level_values("kernel").nunique()
            compared = f"{len(ratios)} | {np.exp(np.log(ratios).mean()):.2f}x" if len(ratios) else "- | -"
            yield f"| {version!s} | {gpu!s} | {kernels} | {len(now)} | {compared} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or add a release."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.releases", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", metavar="VERSION", help="add the picks of results.db as those of a release")
    options = parser.parse_args(arguments)
    if options.add:
        add(options.add)
    else:
        print("\n".join(lines(pd.read_csv(TIMES))))


if __name__ == "__main__":
    main()
