"""What the exported table is worth on shapes it has no row for: the config a lookup gives against the shape's own best.

    fp8tune sweep --shapes unseen --db unseen.db
    python -m benchmarks.unseen --db unseen.db

Needs no GPU. A problem whose key has a row in the table is seen, and not judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from fp8tune.choose import ranking
from fp8tune.choose.candidates import Candidates
from fp8tune.choose.ranking import all_candidates, usable
from fp8tune.records import Kind, NamedInts, Problem
from fp8tune.render.report import Column, Report
from fp8tune.render.terminal import microseconds, notice
from fp8tune.revisions.loading import load_spec
from fp8tune.stats import geomean
from fp8tune.store.results import Store
from fp8tune_kernels.catalog import KERNELS
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.spec import KernelSpec
from fp8tune_kernels.tables import Table

TARGET = 1.05
"""A lookup may lose so much on unseen shapes, in the geometric mean."""
FEWEST_SHAPES = 10
"""Fewer say nothing."""


@dataclass(frozen=True)
class Judged:
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
class Verdict:
    """All unseen problems of a database."""

    judged: tuple[Judged, ...]
    seen: int
    """Problems that the table has a row for."""

    @property
    def shapes(self) -> int:
        """Different shapes among the problems, of whatever kernel."""
        return len({judged.problem.shape for judged in self.judged})

    def geomean(self, kernel: str | None = None) -> float | None:
        """Of the slowdowns there are, of one kernel or all."""
        chosen = [judged for judged in self.judged if kernel in (None, judged.problem.kernel)]
        slowdowns = [judged.slowdown for judged in chosen if judged.slowdown is not None]
        return geomean(slowdowns) if slowdowns else None

    @property
    def exit_code(self) -> int:
        """0 where the target is met, 1 where it is not or a config does not run, 3 with too few shapes."""
        mean = self.geomean()
        if mean is None or self.shapes < FEWEST_SHAPES:
            return 3
        return 0 if mean <= TARGET and all(judged.slowdown for judged in self.judged) else 1


def judge(found: Iterable[Candidates], specs: Mapping[str, KernelSpec], exported: Table) -> Verdict:
    """Every problem that was swept to the end, by what was exported."""
    keys = {(kernel, key) for kernel, _, key, _ in exported.rows}
    judged, seen = [], 0
    for candidates in usable(found):
        spec = specs[candidates.problem.kernel]
        if (spec.name, tuple(sorted(spec.lookup_key(candidates.problem).items()))) in keys:
            seen += 1
        else:
            judged.append(_judged(candidates, spec, exported))
    return Verdict(tuple(judged), seen)


def _judged(candidates: Candidates, spec: KernelSpec, exported: Table) -> Judged:
    config = NamedInts(lookup.pick(spec, spec.lookup_key(candidates.problem), exported, candidates.device.name))
    best = candidates.named[0].config or NamedInts()
    times_us = candidates.times_us
    slowdown = candidates.slowdowns[config] if config in times_us else None
    return Judged(
        candidates.problem, candidates.device.name, config, best, times_us[best], times_us.get(config), slowdown
    )


def show(verdict: Verdict) -> None:
    """A table a kernel, and the geometric means."""
    headers = ("shape", "device", "looked up", "us", "best there", "us", "slower")
    columns = [
        Column(header, "right" if header in ("us", "slower") else "left", itemgetter(i))
        for i, header in enumerate(headers)
    ]
    kernels = dict.fromkeys(judged.problem.kernel for judged in verdict.judged)
    for kernel in kernels:
        Report(kernel, columns, [_cells(each) for each in verdict.judged if each.problem.kernel == kernel]).print()
    for name, mean in {**{kernel: verdict.geomean(kernel) for kernel in kernels}, "all": verdict.geomean()}.items():
        if mean is not None:
            print(f"{name}: {100 * (mean - 1):.1f} % slower in the geometric mean")


def _cells(judged: Judged) -> list[str]:
    layout = "" if judged.problem.input_layout == "contiguous" else f" {judged.problem.input_layout}"
    slower = "does not run" if judged.slowdown is None else f"{100 * (judged.slowdown - 1):+.1f} %"
    cells = [f"{judged.problem.shape}{layout}", judged.device, str(judged.config), microseconds(judged.time_us)]
    return [*cells, str(judged.best), microseconds(judged.best_us), slower]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the database, judge, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unseen", description=__doc__.splitlines()[0])
    parser.add_argument("--db", required=True, help="the database that the unseen shapes were swept into")
    parser.add_argument("--arch", default="sm_90", help="whose table and rows")
    given = parser.parse_args(arguments)
    kinds = [Kind.SIMULATED if given.arch == "simulated" else Kind.MEASURED]
    with Store.open(given.db, writable=False) as store:
        found = all_candidates(store.evidence(arch=given.arch, kinds=kinds, keep=ranking.competing))
    specs = {kernel: load_spec(kernel) for kernel in KERNELS}
    verdict = judge([c for c in found if c.problem.kernel in specs], specs, lookup.table(given.arch))
    show(verdict)
    if verdict.seen:
        notice(f"{verdict.seen} problems are not judged: the table of {given.arch} has a row for their key")
    if verdict.shapes < FEWEST_SHAPES:
        sweep = f"fp8tune sweep --shapes unseen --db {given.db}"
        notice(f"{verdict.shapes} unseen shapes, and {FEWEST_SHAPES} are wanted: {sweep}")
    return verdict.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
