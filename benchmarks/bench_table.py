"""What ``fp8tune bench --format json`` printed, as the one table that documents have: all kernels, wrong rivals named.

fp8tune bench --against torchao --format json > bench.json
python -m benchmarks.bench_table bench.json [more.json ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8tune.render.terminal import microseconds, share
from fp8tune.stats.means import geomean

Row = Mapping[str, Any]
"""One ``"row": "problem"`` of the JSON."""


def lines(rows: Sequence[Row], rival: str) -> Iterator[str]:
    """A markdown table, then the means: a ratio counts where both outputs are right."""
    yield f"| kernel | shape | MB | us | GB/s | of ceiling | {rival} us | ratio |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    ratios: dict[str, list[float]] = {}
    wrong = 0
    for row in rows:
        theirs = row["rivals"].get(rival, {})
        yield f"| {' | '.join(_cells(row, theirs))} |"
        wrong += str(theirs.get("reason", "")).startswith("wrong")
        if (ratio := theirs.get("ratio")) is not None:
            ratios.setdefault(row["kernel"], []).append(ratio)
    yield ""
    every = [ratio for found in ratios.values() for ratio in found]
    means = [f"`{kernel}` {geomean(found):.2f}" for kernel, found in ratios.items()]
    overall = f"of all {len(every)} {geomean(every):.2f}, {min(every):.2f} to {max(every):.2f}" if every else "-"
    yield f"Geometric means: {', '.join(means)}; {overall}."
    yield f"{rival} is wrong on {wrong} of {len(rows)} and in no mean there."


def _cells(row: Row, theirs: Row) -> list[str]:
    shape = " ".join(f"{dim}={size}" for dim, size in row["shape"].items())
    view = "" if row["input_layout"] == "contiguous" else " view"
    rate = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:,.0f}"
    return [
        f"`{row['kernel']}`",
        f"{shape}{view}",
        f"{row['bytes_moved'] / 1e6:,.0f}",
        microseconds(row["time_us"]) or row["reason"],
        row["reason"] if row["time_us"] and row["reason"] else rate,
        share(row["ceiling_share"]),
        microseconds(theirs.get("time_us")) or "-",
        theirs.get("reason", "") if theirs.get("ratio") is None else f"{theirs['ratio']:.2f}x",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_table", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--against", default="torchao")
    given = parser.parse_args(arguments)
    objects = [row for path in given.paths for row in json.loads(path.read_text(encoding="utf-8"))]
    print("\n".join(lines([row for row in objects if row["row"] == "problem"], given.against)))


if __name__ == "__main__":
    main()
