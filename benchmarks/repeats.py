"""Whether picks hold on this device: sweeps from scratch, and re-sweeps with the table that the first of them gave.

    fp8tune calibrate --db calibrated.db
    python -m benchmarks.repeats --kernel mxfp8-dim0 --shapes llama4 --calibration calibrated.db

Each sweep is ``fp8tune sweep`` and ``fp8tune export`` in processes of their own, into a new database. From scratch
means without any committed table, so without an incumbent; the first table is then committed for the re-sweeps. The
kernels are a copy in a temporary folder: nothing here is overwritten.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import fp8tune_kernels
from fp8tune import scratch
from fp8tune.choose import ranking
from fp8tune.choose.calibration import is_calibrated
from fp8tune.choose.incumbents import NO_INCUMBENTS, Incumbents
from fp8tune.choose.ranking import Candidates, all_candidates, usable
from fp8tune.errors import Fp8tuneError, UsageError
from fp8tune.measure.backends.choice import backend_for
from fp8tune.records import Device, Kind, NamedInts, Problem
from fp8tune.render.terminal import notice, print_json
from fp8tune.store.results import Store

AGREEING = 0.90
"""Rows on which two sweeps from scratch come to the same pick, at least."""
ELSE_WITHIN = 1.0125
"""Where they do not, neither pick may be slower than this by the other sweep's times."""


@dataclass(frozen=True)
class Outcome:
    """One sweep: the table it gave, and what it measured."""

    table: bytes
    found: Mapping[Problem, Candidates]


@dataclass(frozen=True)
class Repeats:
    """What the sweeps say of each other."""

    same_tables: int
    """Re-sweeps whose table has the committed one's bytes."""
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


class Desk:
    """A folder with a copy of the kernels and every database and table of one run."""

    def __init__(self, folder: Path, given: argparse.Namespace, arch: str) -> None:
        self._folder, self._given, self._arch, self._swept = folder, given, arch, 0
        source = Path(fp8tune_kernels.__file__).parent
        self._kernels = folder / "kernels" / source.name
        shutil.copytree(
            source, self._kernels, ignore=shutil.ignore_patterns("__pycache__", "sm_*", "gfx*", "simulated*")
        )
        paths = [str(self._kernels.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def sweep(self, name: str) -> Outcome:
        """Sweep into a new database and export from it alone. Raises UsageError where either command fails."""
        database, table = self._folder / f"{name}.db", self._folder / f"{name}.py"
        given = self._given
        if given.calibration:
            shutil.copy(given.calibration, database)
        wished = [option for shapes in given.shapes for option in ("--shapes", shapes)]
        self._swept += 1
        timer = ["--timer", f"{given.timer}.{self._swept}"] if given.timer else []
        self._fp8tune("sweep", "--kernel", given.kernel, *wished, *timer, "--db", str(database))
        self._fp8tune("export", "--arch", self._arch, "--db", str(database), "--output", str(table))
        return Outcome(table.read_bytes(), measured(database, self._arch))

    def commit(self, outcome: Outcome) -> None:
        """Make this the table that later sweeps find their incumbents in."""
        (self._kernels / "tables" / f"{self._arch}.py").write_bytes(outcome.table)

    def _fp8tune(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "fp8tune.cli", *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True)
        if done.returncode:
            raise UsageError(
                f"fp8tune {' '.join(arguments[:3])} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            )


def measured(database: Path, arch: str, incumbents: Incumbents = NO_INCUMBENTS) -> Mapping[Problem, Candidates]:
    """Every problem that was swept to the end, with the pick that it comes to from scratch or against a table."""
    kind = Kind.SIMULATED if arch == "simulated" else Kind.MEASURED
    with Store.open(str(database), writable=False) as store:
        found = usable(all_candidates(store.evidence(arch=arch, kinds=[kind], keep=ranking.competing), incumbents))
    return {candidates.problem: candidates for candidates in found}


def check_calibration(database: str, device: Device) -> None:
    """Raises UsageError unless a database holds a calibration of the device, and no rows a sweep would begin with."""
    with Store.open(database, writable=False) as store:
        if store.counts():
            raise UsageError(f"{database} has rows: --calibration takes a database that nothing was swept into")
        if not is_calibrated(store.calibration(device)):
            raise UsageError(f"{database} has no calibration of this device: fp8tune calibrate --db {database}")


@contextlib.contextmanager
def desk_folder(keep: Path | None) -> Iterator[Path]:
    """A new folder, which stays if it was named. Raises UsageError where it cannot be made, as where it exists: sweeps
    begin without rows."""
    if keep is None:
        with scratch.folder("repeats") as folder:
            yield folder
        return
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{keep}: {error.strerror}. --keep takes a folder that is not there yet") from None
    yield keep


def run(desk: Desk, scratch: int, resweeps: int, deadline: float) -> Repeats:
    """All sweeps, a line each. None begins that would end after ``deadline`` (monotonic), judging by the last."""
    first = list(_timed(desk, "from scratch", scratch, deadline))
    again: list[bytes] = []
    if first:
        desk.commit(first[0])
        for outcome in _timed(desk, "re-sweep", resweeps, deadline):
            again.append(outcome.table)
            for line in changed(first[0].table, outcome.table):
                notice(f"  {line}")
    same = again.count(first[0].table) if first else 0
    compared = [slower for one, other in itertools.combinations(first, 2) for slower in between(one, other)]
    return Repeats(same, len(again), len(compared), compared.count(None), max((s for s in compared if s), default=1.0))


def _timed(desk: Desk, what: str, count: int, deadline: float) -> Iterator[Outcome]:
    took = 0.0
    for number in range(1, count + 1):
        begun = time.monotonic()
        if begun + took > deadline:
            notice(f"time is up: {count - number + 1} of {count} {what} are left out")
            return
        outcome = desk.sweep(f"{what.replace(' ', '-')}-{number}")
        took = time.monotonic() - begun
        notice(f"{what} {number}/{count}: {len(outcome.found)} problems, {took:.0f} s")
        yield outcome


def between(one: Outcome, other: Outcome) -> Iterator[float | None]:
    """For each problem of both: None for the same pick, else the larger slowdown of one's pick by the other's times.

    What was no finalist in the other sweep has only its screen there, so each is taken against the best of its stage.
    """
    for problem, mine in one.found.items():
        if theirs := other.found.get(problem):
            picks: list[NamedInts] = [candidates.pick.config or NamedInts() for candidates in (mine, theirs)]
            if picks[0] == picks[1]:
                yield None
            else:
                both = [(theirs, picks[0], picks[1]), (mine, picks[1], picks[0])]
                yield max(judge.slowdown(pick) / judge.slowdown(own) for judge, pick, own in both)


def changed(before: bytes, after: bytes) -> list[str]:
    """The lines of a table that another has not, whatever they are."""
    old, new = (text.decode().splitlines() for text in (before, after))
    lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]  # after the two names
    return [line for line in lines if not line.startswith("@@")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repeats", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", default="mxfp8-dim0")
    parser.add_argument("--shapes", action="append", help="a shape set or a path.toml; repeatable (default: llama4)")
    parser.add_argument("--scratch", type=int, default=10, help="sweeps without a committed table (default: 10)")
    parser.add_argument("--resweeps", type=int, default=20, help="sweeps with the first one's table (default: 20)")
    parser.add_argument(
        "--deadline", type=float, default=float("inf"), metavar="S", help="begin none that would end later"
    )
    parser.add_argument("--calibration", metavar="DB", help="fp8tune calibrate of this device; each sweep goes by it")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep every database and table in this new folder")
    parser.add_argument("--timer", help="simulated:SEED runs on a fake GPU, each sweep with noise of its own")
    parser.add_argument("--json", action="store_true", help="one JSON document at the end")
    given = parser.parse_args(arguments)
    given.shapes = given.shapes or ["llama4"]
    backend, _ = backend_for(None, given.timer)
    if given.calibration:
        check_calibration(given.calibration, backend.device)
    notice(f"on {backend.device.fingerprint}")
    with desk_folder(given.keep) as folder:
        desk = Desk(folder, given, backend.device.arch)
        told = run(desk, given.scratch, given.resweeps, time.monotonic() + given.deadline)
    if given.json:
        print_json({**vars(told), "exit_code": told.exit_code})
    else:
        print(f"re-sweeps with the same table, byte for byte: {told.same_tables} of {told.resweeps}")
        apart = 100 * (told.worst - 1)
        print(f"the same pick from scratch: {told.agreeing} of {told.pairs}; else {apart:.2f} % apart at worst")
    return told.exit_code


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Fp8tuneError as error:
        notice(str(error))
        raise SystemExit(error.exit_code) from None
