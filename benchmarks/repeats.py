"""Measure whether picks hold on this device: sweeps from scratch, and re-sweeps with the first one's table.

    python -m benchmarks.repeats --kernel mxfp8-dim0 --shapes llama4

Each sweep goes into a database of its own: without a table or, for the re-sweeps, with the first one's.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import Fp8tuneError
from fp8tune.exporting import select_rows
from fp8tune.options import SweepOptions
from fp8tune.output.tables import notice
from fp8tune.records import NamedInts, Problem
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.studies import read_studies
from fp8tune.sweeping.loop import sweep
from fp8tune.sweeping.planning import expanded, planned
from fp8tune.tables.current import NO_TABLES, CurrentTables
from fp8tune_kernels.tables import Table

AGREEING = 0.90
"""Rows on which two sweeps from scratch come to the same pick, at least."""
ELSE_WITHIN = 1.0125
"""If they do not, neither pick may be slower than this by the other sweep's times."""


@dataclass(frozen=True)
class Outcome:
    """One sweep: the table it gave, and what it measured."""

    module: str
    """The text of the table."""
    table: Table
    results: Mapping[Problem, Study]


@dataclass(frozen=True)
class Repeats:
    """Agreement of the sweeps with each other."""

    same_tables: int
    """Re-sweeps whose table has the first one's bytes."""
    resweeps: int
    pairs: int
    """Problems times pairs of sweeps from scratch."""
    agreeing: int
    worst: float
    """The largest slowdown of one sweep's pick by another's times: 1.01 is one percent."""

    @property
    def exit_code(self) -> int:
        """0 where picks held, 1 where they did not, 3 where nothing was compared."""
        if not self.resweeps and not self.pairs:
            return 3
        agree = self.agreeing >= AGREEING * self.pairs and self.worst <= ELSE_WITHIN
        return 0 if self.same_tables == self.resweeps and agree else 1


def swept(options: SweepOptions, folder: Path, tables: CurrentTables) -> Outcome:
    """Sweep into a new database in a folder, and make the table of it alone."""
    plan = expanded(planned(options, "repeats"), tables)
    with Store.open(str(folder / f"{len(list(folder.iterdir()))}.db"), create=True) as store:
        for _ in sweep(store, plan):
            pass
        table = select_rows(store, plan.backend.device.arch, tables=tables).table
        studies = read_studies(store, arch=plan.backend.device.arch, tables=NO_TABLES)
    rows = Table(tuple(entry.row for entry in table.entries), tuple(sorted(table.nearest)))
    return Outcome(table.render(), rows, {study.problem: study for study in studies if study.is_usable})


def run(options: argparse.Namespace, folder: Path) -> Repeats:
    """All sweeps, a line each. None begins that would end after the deadline, judging by the last."""
    clocks = (f"{options.timer}.{number}" if options.timer else None for number in itertools.count(1))
    deadline = time.monotonic() + options.deadline

    def sweeps(what: str, count: int, tables: CurrentTables) -> Iterator[Outcome]:
        took_s = 0.0
        for number in range(1, count + 1):
            begun = time.monotonic()
            if begun + took_s > deadline:
                notice(f"time is up: {count - number + 1} of {count} {what} are left out")
                return
            sweep = SweepOptions(kernel=(options.kernel,), shapes=tuple(options.shapes), timer=next(clocks))
            outcome = swept(sweep, folder, tables)
            took_s = time.monotonic() - begun
            notice(f"{what} {number}/{count}: {len(outcome.results)} problems, {took_s:.0f} s")
            yield outcome

    first = list(sweeps("from scratch", options.scratch, NO_TABLES))
    same = again = 0
    if first:
        for outcome in sweeps("re-sweep", options.resweeps, CurrentTables(lambda arch: first[0].table)):
            again, same = again + 1, same + (outcome.module == first[0].module)
            for line in changed(first[0].module, outcome.module):
                notice(f"  {line}")
    compared = [slower for value, second in itertools.combinations(first, 2) for slower in between(value, second)]
    return Repeats(same, again, len(compared), compared.count(None), max((s for s in compared if s), default=1.0))


def between(value: Outcome, second: Outcome) -> Iterator[float | None]:
    """For each problem of both: None for the same pick, else the larger slowdown of one's pick by the other's times.

    What was no finalist in the other sweep has only its screen there, so each is taken against the best of its stage.
    """
    for problem, mine in value.results.items():
        if theirs := second.results.get(problem):
            picks: list[NamedInts] = [candidates.pick.config or NamedInts() for candidates in (mine, theirs)]
            both = ((theirs, picks[0], picks[1]), (mine, picks[1], picks[0]))
            slower = [times.slowdowns[pick] / times.slowdowns[own] for times, pick, own in both if pick != own]
            yield max(slower, default=None)


def changed(before: str, after: str) -> list[str]:
    """The lines of a table that another has not, whatever they are."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]  # after the names
    return [line for line in lines if not line.startswith("@@")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repeats", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", default="mxfp8-dim0")
    parser.add_argument("--shapes", action="append", help="a shape set or a path.toml; repeatable (default: llama4)")
    parser.add_argument("--scratch", type=int, default=10, help="sweeps without a committed table (default: 10)")
    parser.add_argument("--resweeps", type=int, default=20, help="sweeps with the first one's table (default: 20)")
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="S", help="begin none that would end later")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep every database in this new folder")
    parser.add_argument("--timer", help="simulated:SEED runs on a fake GPU, each sweep with noise of its own")
    options = parser.parse_args(arguments)
    options.shapes = options.shapes or ["llama4"]
    with tempfile.TemporaryDirectory() as temporary:
        if options.keep:
            options.keep.mkdir(parents=True)
        result = run(options, options.keep or Path(temporary))
    print(f"re-sweeps with the same table, byte for byte: {result.same_tables} of {result.resweeps}")
    apart = 100 * (result.worst - 1)
    print(f"the same pick from scratch: {result.agreeing} of {result.pairs}; else {apart:.2f} % apart at worst")
    return result.exit_code


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Fp8tuneError as error:
        notice(str(error))
        raise SystemExit(error.exit_code) from None
