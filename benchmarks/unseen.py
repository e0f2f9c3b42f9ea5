"""Quality of the exported table on shapes that it has no row for: the looked-up config against the shape's best.

    fp8tune sweep --shapes unseen --db unseen.db
    python -m benchmarks.unseen --db unseen.db

Needs no GPU. A problem whose key has a row in the table is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp8tune.output.tables import Column, Screen, notice, number
from fp8tune.output.text import microseconds, pairs, ratio
from fp8tune.records import Kind, NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.stats.means import geomean
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.studies import read_studies
from fp8tune.tables.current import NO_TABLES
from fp8tune_kernels.catalog import KERNELS
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.spec import KernelSpec
from fp8tune_kernels.tables import Table

TARGET = 1.05
"""A lookup may lose so much on unseen shapes, in the geometric mean."""
FEWEST_SHAPES = 10
"""Fewer say nothing."""


@dataclass(frozen=True)
class Lookup:
    """One unseen problem. Times in microseconds."""

    problem: Problem
    device: str
    config: NamedInts
    """What a lookup gives."""
    best: NamedInts
    best_us: float
    time_us: float | None
    slowdown: float | None
    """What the lookup loses, at least 1. None, as is the time, where its config does not run."""


@dataclass(frozen=True)
class Lookups:
    """All unseen problems of a database."""

    unseen: tuple[Lookup, ...]
    seen: int
    """Problems that the table has a row for."""

    @property
    def shapes(self) -> int:
        """Different shapes among the problems, of whatever kernel."""
        return len({item.problem.shape for item in self.unseen})

    def geomean(self, kernel: str | None = None) -> float | None:
        """Return the geometric mean of the slowdowns of one kernel, or of all."""
        chosen = [item.slowdown for item in self.unseen if kernel in (None, item.problem.kernel)]
        slowdowns = [slowdown for slowdown in chosen if slowdown is not None]
        return geomean(slowdowns) if slowdowns else None

    @property
    def exit_code(self) -> int:
        """0 where the target is met, 1 where it is not or a config does not run, 3 with too few shapes."""
        mean = self.geomean()
        if mean is None or self.shapes < FEWEST_SHAPES:
            return 3
        return 0 if mean <= TARGET and all(item.slowdown for item in self.unseen) else 1


def look_up(results: Iterable[Study], specs: Mapping[str, KernelSpec], exported: Table) -> Lookups:
    """Every problem that was swept to the end, by what was exported."""
    keys = {(kernel, key) for kernel, _, key, _ in exported.rows}
    unseen, seen = [], 0
    for candidates in (study for study in results if study.is_usable):
        problem, device, times_us = candidates.problem, candidates.device.name, candidates.times_us
        spec = specs[problem.kernel]
        key = spec.lookup_key(problem)
        if (spec.name, tuple(sorted(key.items()))) in keys:
            seen += 1
            continue
        config = NamedInts(lookup.pick(spec, key, exported, device))
        best = next(result.config for result in candidates.results if result.config is not None)
        slowdown = candidates.slowdowns[config] if config in times_us else None
        unseen.append(Lookup(problem, device, config, best, times_us[best], times_us.get(config), slowdown))
    return Lookups(tuple(unseen), seen)


def show(results: Lookups) -> None:
    """Print a table for each kernel, and the geometric means."""
    for kernel in dict.fromkeys(item.problem.kernel for item in results.unseen):
        rows = [item for item in results.unseen if item.problem.kernel == kernel]
        losses = ["does not run" if row.slowdown is None else ratio(row.slowdown) for row in rows]
        columns = [
            Column("size", [f"{pairs(row.problem.shape)} {row.problem.input_layout}" for row in rows]),
            Column("device", [row.device for row in rows]),
            Column("looked up", [str(row.config) for row in rows]),
            number("us", [microseconds(row.time_us) for row in rows]),
            Column("best there", [str(row.best) for row in rows]),
            number("us", [microseconds(row.best_us) for row in rows]),
            number("slower", losses),
        ]
        Screen([f"{kernel}: {ratio(results.geomean(kernel))} slower (geometric mean)"], columns).print()
    print(f"all: {ratio(results.geomean())} slower (geometric mean)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the database, look up, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unseen", description=__doc__.splitlines()[0])
    parser.add_argument("--db", required=True, help="the database that the unseen shapes were swept into")
    parser.add_argument("--arch", default="sm_90", help="whose table and rows")
    options = parser.parse_args(arguments)
    kinds = [Kind.SIMULATED if options.arch == "simulated" else Kind.MEASURED]
    with Store.open(options.db, writable=False) as store:
        results = read_studies(store, arch=options.arch, kinds=kinds, tables=NO_TABLES)
    specs = {kernel: load_spec(kernel) for kernel in KERNELS}
    lookups = look_up([c for c in results if c.problem.kernel in specs], specs, lookup.table(options.arch))
    show(lookups)
    if lookups.seen:
        notice(f"{lookups.seen} problems are not judged: the table of {options.arch} has a row for their key")
    if lookups.shapes < FEWEST_SHAPES:
        sweep = f"fp8tune sweep --shapes unseen --db {options.db}"
        notice(f"{lookups.shapes} unseen shapes, and {FEWEST_SHAPES} are wanted: {sweep}")
    return lookups.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
