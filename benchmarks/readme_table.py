"""How fast each kernel was, as a table in markdown from the results database: no figure in it is typed by hand.

python -m benchmarks.printed                 # writes it into the pages that have it
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from fp8tune.ceiling import ceiling_of
from fp8tune.records import Kind
from fp8tune.render.terminal import microseconds, share
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.studies import read_studies
from fp8tune.tables.current import NO_TABLES
from fp8tune_kernels.catalog import KERNELS

ROOT = Path(__file__).resolve().parent.parent


def complete_studies(db: Path) -> Sequence[Study]:
    """The measured best of every problem that was swept to the end."""
    return _complete_studies(db, db.stat().st_mtime_ns)


@functools.lru_cache(1)  # two tables of the pages are made of them
def _complete_studies(db: Path, changed_ns: int) -> Sequence[Study]:
    with Store.open(str(db), writable=False) as store:
        studies = read_studies(store, kinds=[Kind.MEASURED], tables=NO_TABLES)
    return [study for study in studies if study.complete and study.bytes_moved]


def markdown(studies: Iterable[Study]) -> str:
    """A line a kernel and device, in the family's order: how near the ceiling, and its problem of most bytes."""
    groups: dict[tuple[str, str], list[Study]] = {}
    for study in studies:
        groups.setdefault((study.device.name, study.problem.kernel), []).append(study)
    order = {name: number for number, name in enumerate(KERNELS)}
    header = "| device | kernel | problems | of ceiling: least | median | most | of them the largest | us | GB/s |"
    lines = [header, "|---|---|---:|---:|---:|---:|---|---:|---:|"]
    for device, kernel in sorted(groups, key=lambda group: (group[0], order.get(group[1], len(order)), group[1])):
        lines.append(f"| {device} | `{kernel}` | {' | '.join(_cells(groups[device, kernel]))} |")
    return "\n".join(lines)


def _cells(group: Sequence[Study]) -> list[str]:
    shares = [ceiling.share for study in group if (ceiling := ceiling_of(study)) is not None]
    largest = max(group, key=lambda study: (study.bytes_moved or 0, str(study.problem)))
    layout = "" if largest.problem.input_layout == "contiguous" else f" {largest.problem.input_layout}"
    rate = (largest.bytes_moved or 0) / largest.choice.time_us / 1e3  # bytes/us = MB/s
    spread = [share(pick(shares)) for pick in (min, statistics.median, max)] if shares else ["", "", ""]
    return [
        str(len(group)),
        *spread,
        f"{largest.problem.shape}{layout}",
        microseconds(largest.choice.time_us),
        f"{rate:,.0f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_table", description=__doc__.splitlines()[0])
    parser.add_argument("--db", type=Path, default=ROOT / "results.db")
    print(markdown(complete_studies(parser.parse_args(arguments).db)))


if __name__ == "__main__":
    main()
