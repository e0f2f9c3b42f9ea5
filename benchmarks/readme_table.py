"""How fast each kernel was, as a table in markdown from the results database: no figure in it is typed by hand.

python -m benchmarks.printed                 # writes it into the pages that have it
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from fp8tune.choose import ranking
from fp8tune.choose.candidates import Winner
from fp8tune.records import Kind
from fp8tune.render.terminal import microseconds, share
from fp8tune.store.results import Store
from fp8tune_kernels.catalog import KERNELS

ROOT = Path(__file__).resolve().parent.parent


def winners(db: Path) -> Sequence[Winner]:
    """The measured best of every problem that was swept to the end."""
    return _winners(db, db.stat().st_mtime_ns)


@functools.lru_cache(1)  # two tables of the pages are made of them
def _winners(db: Path, changed_ns: int) -> Sequence[Winner]:
    with Store.open(str(db), writable=False) as store:
        evidence = store.evidence(kinds=[Kind.MEASURED], keep=ranking.competing, finalists_only=True)
    return [winner for winner in ranking.winners(evidence) if winner.evidence.complete and winner.evidence.bytes_moved]


def markdown(winners: Iterable[Winner]) -> str:
    """A line a kernel and device, in the family's order: how near the ceiling, and its problem of most bytes."""
    groups: dict[tuple[str, str], list[Winner]] = {}
    for winner in winners:
        groups.setdefault((winner.device.name, winner.problem.kernel), []).append(winner)
    order = {name: number for number, name in enumerate(KERNELS)}
    header = "| device | kernel | problems | of ceiling: least | median | most | of them the largest | us | GB/s |"
    lines = [header, "|---|---|---:|---:|---:|---:|---|---:|---:|"]
    for device, kernel in sorted(groups, key=lambda group: (group[0], order.get(group[1], len(order)), group[1])):
        lines.append(f"| {device} | `{kernel}` | {' | '.join(_cells(groups[device, kernel]))} |")
    return "\n".join(lines)


def _cells(group: Sequence[Winner]) -> list[str]:
    shares = [winner.ceiling_share for winner in group if winner.ceiling_share is not None]
    largest = max(group, key=lambda winner: (winner.evidence.bytes_moved or 0, str(winner.problem)))
    layout = "" if largest.problem.input_layout == "contiguous" else f" {largest.problem.input_layout}"
    rate = (largest.evidence.bytes_moved or 0) / largest.time_us / 1e3  # bytes/us = MB/s
    spread = [share(pick(shares)) for pick in (min, statistics.median, max)] if shares else ["", "", ""]
    return [str(len(group)), *spread, f"{largest.problem.shape}{layout}", microseconds(largest.time_us), f"{rate:,.0f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_table", description=__doc__.splitlines()[0])
    parser.add_argument("--db", type=Path, default=ROOT / "results.db")
    print(markdown(winners(parser.parse_args(arguments).db)))


if __name__ == "__main__":
    main()
