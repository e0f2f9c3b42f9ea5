"""What ``fp8tune bench --format json`` printed, as the one table that documents have: all kernels, wrong rivals named.

fp8tune bench --against torchao --format json > bench.json
python -m benchmarks.bench_table bench.json [more.json ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8tune.render.terminal import microseconds, share
from fp8tune.stats import geomean

Row = Mapping[str, Any]
"""One ``"row": "problem"`` of the JSON."""


def rows(paths: Iterable[Path]) -> list[Row]:
    """The problems of all files, in their order."""
    objects = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))]
    return [row for row in objects if row["row"] == "problem"]


def lines(rows: Sequence[Row], rival: str = "torchao") -> Iterator[str]:
    """A markdown table, then the means: a ratio counts where both outputs are right."""
    yield f"| kernel | shape | MB | us | GB/s | of ceiling | {rival} us | ratio |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        yield f"| {' | '.join(_cells(row, rival))} |"
    yield ""
    means = [f"`{kernel}` {geomean(found):.2f}" for kernel in _kernels(rows) if (found := _ratios(rows, rival, kernel))]
    counted, wrong = _ratios(rows, rival), sum(_is_wrong(row, rival) for row in rows)
    overall = (
        f"of all {len(counted)} {geomean(counted):.2f}, {min(counted):.2f} to {max(counted):.2f}" if counted else "-"
    )
    yield f"Geometric means: {', '.join(means)}; {overall}."
    yield f"{rival} is wrong on {wrong} of {len(rows)} and in no mean there."


def _cells(row: Row, rival: str) -> list[str]:
    shape = " ".join(f"{dim}={size}" for dim, size in row["shape"].items())
    view = "" if row["input_layout"] == "contiguous" else " view"
    theirs = row["rivals"].get(rival, {})
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


def _is_wrong(row: Row, rival: str) -> bool:
    return str(row["rivals"].get(rival, {}).get("reason", "")).startswith("wrong")


def _kernels(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["kernel"] for row in rows))


def _ratios(rows: Sequence[Row], rival: str, kernel: str | None = None) -> list[float]:
    ratios = [row["rivals"].get(rival, {}).get("ratio") for row in rows if kernel in (None, row["kernel"])]
    return [ratio for ratio in ratios if ratio is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_table", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--against", default="torchao")
    given = parser.parse_args(arguments)
    print("\n".join(lines(rows(given.paths), given.against)))


if __name__ == "__main__":
    main()
