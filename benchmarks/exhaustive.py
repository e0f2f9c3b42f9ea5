"""What a sweep's picks lose against an exhaustive oracle on the same device.

    fp8tune sweep --kernel colwise --shapes four.toml --db picks.db
    python -m benchmarks.exhaustive --kernel colwise --shapes four.toml --db picks.db

The oracle times all configs in 3 fresh processes and those within 10 % of the best in 30; each process goes through all
problems. A config's time is the median of its processes'. Nothing is stored. What the database's rows come to is judged
twice: from scratch, and with the committed table, whose config stays where none is proven to be faster by more than the
keep band. Rows that cannot be told apart here (``unresolvable``) are not judged.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.repeats import measured
from fp8tune.choose.decision import PickVerdict
from fp8tune.choose.incumbents import COMMITTED, NO_INCUMBENTS
from fp8tune.choose.ranking import Candidates
from fp8tune.errors import Fp8tuneError, UsageError
from fp8tune.measure.clock import Slot
from fp8tune.measure.laboratory import Batch, Laboratory, OpenLaboratory
from fp8tune.records import NamedInts, Problem, Status
from fp8tune.render.terminal import microseconds, notice, print_json, table
from fp8tune.stats import median
from fp8tune.sweep import session

ALL, NEAR, NEAR_RATIO = 3, 30, 1.10
"""Processes for all configs, for those near the best, and what is near."""
MEAN, MOST = 0.005, 0.02
"""Regrets asked for: the mean's and the largest."""


@dataclass
class Truth:
    """One problem: what its configs take, a value for each process in microseconds."""

    batch: Batch
    times_us: dict[NamedInts, list[float]] = field(default_factory=dict)
    timed_on: list[NamedInts] = field(default_factory=list)
    """The configs that the next process times."""

    @property
    def medians_us(self) -> Mapping[NamedInts, float]:
        """Config -> its time."""
        return {config: median(times) for config, times in self.times_us.items()}

    def keep_near(self) -> None:
        """Go on with the configs within :data:`NEAR_RATIO` of the best."""
        best_us = min(self.medians_us.values(), default=math.inf)
        self.timed_on = [config for config, time_us in self.medians_us.items() if time_us <= NEAR_RATIO * best_us]


@dataclass(frozen=True)
class Regret:
    """One problem's pick against the oracle."""

    problem: Problem
    pick: NamedInts
    best: NamedInts
    best_us: float
    share: float
    """How much slower the pick is: 0.01 is one percent; infinite where it cannot be launched."""
    processes: int
    """That timed the oracle's."""

    @property
    def name(self) -> str:
        """The problem in short."""
        layout = "" if self.problem.input_layout == "contiguous" else f" {self.problem.input_layout}"
        return f"{self.problem.kernel} {self.problem.shape}{layout}"


def times(laboratory: Laboratory, batches: Sequence[Batch], deadline: float) -> Iterator[list[Truth]]:
    """What is known after each process, the last of which brings the answer. None begins after ``deadline``."""
    truths = [Truth(batch) for batch in batches]
    with OpenLaboratory(laboratory) as lab:
        for batch in batches:
            lab.compile(batch, batch.trials)
        for truth in truths:
            truth.timed_on = list(_launchable(lab, truth.batch))
        for process in range(NEAR):
            if time.monotonic() > deadline:
                notice(f"time is up after {process} of {NEAR} processes")
                return
            lab.fresh_runner()
            for truth in truths:
                _visit(lab, truth, process)
                if process + 1 == ALL:
                    truth.keep_near()
            yield truths


def _launchable(lab: OpenLaboratory, batch: Batch) -> Iterator[NamedInts]:
    """Wait for the compilers."""
    for trial in batch.trials:
        if trial.pruned is None and lab.compiled_outcome(batch.problem, trial.config).status is Status.OK:
            yield trial.config


def _visit(lab: OpenLaboratory, truth: Truth, process: int) -> None:
    if reason := lab.prepare_final(truth.batch):
        raise UsageError(f"{truth.batch.problem}: {reason}")
    order = list(truth.timed_on)
    random.Random(f"exhaustive {process} {truth.batch.problem}").shuffle(order)
    for position, config in enumerate(order):
        outcome = lab.run_final(truth.batch, config, Slot(process + 1, 0, position))
        if outcome.time_us is not None:
            truth.times_us.setdefault(config, []).append(outcome.time_us)


def regrets(truths: Sequence[Truth], picks: Mapping[Problem, Candidates]) -> list[Regret]:
    """Of every problem that has a pick. Raises UsageError where none has."""
    found = []
    for truth in truths:
        candidates = picks.get(truth.batch.problem)
        if candidates is not None and truth.medians_us and candidates.winner.verdict is not PickVerdict.UNRESOLVABLE:
            medians_us, pick = truth.medians_us, candidates.pick.config or NamedInts()
            best = min(medians_us, key=medians_us.__getitem__)
            share = medians_us.get(pick, math.inf) / medians_us[best] - 1
            found.append(Regret(truth.batch.problem, pick, best, medians_us[best], share, len(truth.times_us[best])))
    if not found:
        raise UsageError("the database has no pick for these kernels and shapes: sweep them into it first")
    return found


def show(what: str, found: Sequence[Regret]) -> None:
    """A row a problem, and what is asked for."""
    columns = [("problem", "left"), ("pick", "left"), ("the oracle's", "left"), ("us", "right"), ("regret", "right")]
    rows = [[r.name, str(r.pick), str(r.best), microseconds(r.best_us), f"{100 * r.share:.2f} %"] for r in found]
    table(f"picks {what} against all configs, {found[0].processes} processes", columns, rows)
    shares = [regret.share for regret in found]
    mean, high = 100 * np.mean(shares), 100 * np.percentile(shares, 95)
    most = 100 * max(shares)
    print(f"regret {what}: mean {mean:.2f} %, 95th percentile {high:.2f} %, largest {most:.2f} % of {len(shares)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, compare, print. Exit code 1 where picks lose more than asked, 3 where time was up too early."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exhaustive", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", action="append", required=True, help="repeatable")
    parser.add_argument("--shapes", action="append", required=True, help="a shape set or a path.toml; repeatable")
    parser.add_argument("--db", required=True, help="the database with the picks")
    parser.add_argument(
        "--deadline", type=float, default=math.inf, metavar="S", help="begin no process after S seconds"
    )
    parser.add_argument("--timer", help="simulated:SEED runs on a fake GPU")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + given.deadline
    job = session.take(session.Wish(tuple(given.kernel), tuple(given.shapes), timer=given.timer))
    notice(f"on {job.laboratory.device.fingerprint}")
    truths: list[Truth] = []
    number = 0
    for number, truths in enumerate(times(job.laboratory, session.prepare(job).request.batches, deadline), start=1):
        left = sum(len(truth.timed_on) for truth in truths)
        notice(f"process {number} of {NEAR}: {left} configs of {len(truths)} problems go on")
    if not truths or number < ALL:
        return 3
    tables = {"from scratch": NO_INCUMBENTS, "with the committed table": COMMITTED}
    arch = job.laboratory.device.arch
    judged = {what: regrets(truths, measured(given.db, arch, incumbents)) for what, incumbents in tables.items()}
    if given.json:
        print_json(
            {what: [{**vars(regret), "problem": regret.name} for regret in found] for what, found in judged.items()}
        )
    else:
        for what, found in judged.items():
            show(what, found)
    shares = [[regret.share for regret in found] for found in judged.values()]
    return 0 if all(np.mean(each) <= MEAN and max(each) <= MOST for each in shares) else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Fp8tuneError as error:
        notice(str(error))
        raise SystemExit(error.exit_code) from None
