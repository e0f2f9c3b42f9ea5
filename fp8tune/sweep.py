"""plan -> compile -> check -> measure -> store: one commit a trial, and an event for whoever shows it.

Each problem is screened in rounds, every round a seeded permutation: the first has every config, the later ones those
within 1.3x of the best so far. A trial that fails is a row with its reason; the sweep goes on. Whatever already has a
row is not run again, so that the same command continues a sweep that was stopped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8tune.laboratory import TRIAL_TIMEOUT_S, Batch, CompileProgress, Laboratory, OpenLaboratory
from fp8tune.plan import Planned
from fp8tune.records import Device, KernelVersion, NamedInts, Outcome, Problem, Row, Status
from fp8tune.stats import median
from fp8tune.store import Store

ROUNDS = 3
CONTENDER_RATIO = 1.3
"""Later rounds repeat only configs within this ratio of the best: the others cannot be the pick."""


@dataclass(frozen=True)
class Request:
    """One sweep as asked for."""

    batches: tuple[Batch, ...]
    laboratory: Laboratory
    key: str
    """Names the same request again, so that a killed sweep continues."""
    command: str = ""
    commit: str = ""
    seed: int = 0
    again: bool = False
    retry_failed: bool = False
    time_budget_s: float | None = None
    trial_timeout_s: float = TRIAL_TIMEOUT_S


@dataclass(frozen=True)
class Started:
    """First event: what will be done."""

    device: Device
    planned: int
    stored: int
    """Trials that already have a row."""


@dataclass(frozen=True)
class TrialDone:
    """A trial has a row, now or from before."""

    row: Row
    from_database: bool


@dataclass(frozen=True)
class Finished:
    """Last event of a sweep that was not interrupted."""

    trials: int
    seconds: float
    left_out: int = 0
    """Trials that a time budget left out."""


@dataclass(frozen=True)
class Repeated:
    """A later round begins: so many trials more than were announced."""

    problem: Problem
    round: int
    trials: int


Event = Started | CompileProgress | Repeated | TrialDone | Finished


def sweep(store: Store, request: Request) -> Iterator[Event]:
    """Run a request, storing as it goes. Closing the generator ends the workers and keeps every stored row."""
    begun = time.monotonic()
    sweep_id = store.begin_sweep(
        request.key,
        request.laboratory.device,
        command=request.command,
        commit=request.commit,
        timer=request.laboratory.timer,
        seed=request.seed,
        again=request.again,
    )
    screens = [_Screen(store, request, batch, sweep_id) for batch in request.batches]
    planned = sum(len(batch.trials) for batch in request.batches)
    yield Started(request.laboratory.device, planned, sum(len(screen.known(0)) for screen in screens))
    with OpenLaboratory(request.laboratory, request.trial_timeout_s) as lab:
        for screen in screens:
            if unknown := screen.unknown():
                lab.compile(screen.batch, unknown)
                lab.warm_up(screen.batch)
        trials = 0
        for number, screen in enumerate(screens):
            if request.time_budget_s is not None and time.monotonic() - begun > request.time_budget_s:
                left_out = sum(len(late.unknown()) for late in screens[number:])
                yield Finished(trials, time.monotonic() - begun, left_out)
                return
            for event in screen.run(lab):
                trials += isinstance(event, TrialDone)
                yield event
        store.finish_sweep(sweep_id)
    yield Finished(trials, time.monotonic() - begun)


def recall(store: Store, laboratory: Laboratory, problems: Sequence[tuple[KernelVersion, Problem]]) -> Iterator[Event]:
    """The events of a finished sweep from its rows alone: nothing is planned, no worker starts."""
    begun = time.monotonic()
    rows = [
        Row(problem, config, laboratory.device, laboratory.kind, outcome, version, round=number)
        for version, problem in problems
        for number in range(ROUNDS if laboratory.times else 1)
        for config, outcome in store.tried(version, laboratory.device, laboratory.kind, problem, round=number).items()
    ]
    yield Started(laboratory.device, len(rows), len(rows))
    for row in rows:
        yield TrialDone(row, from_database=True)
    yield Finished(len(rows), time.monotonic() - begun)


@dataclass(frozen=True)
class _Screen:
    """One problem's rounds."""

    store: Store
    request: Request
    batch: Batch
    sweep_id: int

    def run(self, lab: OpenLaboratory) -> Iterator[Event]:
        """All rounds of the problem, with what is stored already in its place."""
        times_us: dict[NamedInts, list[float]] = {}
        for number in range(ROUNDS if self.request.laboratory.times else 1):
            trials = _permuted(_contenders(self.batch.trials, times_us), self.batch.problem, self.request.seed, number)
            if number and trials:
                yield Repeated(self.batch.problem, number, len(trials))
            for event in self._round(lab, number, trials):
                if isinstance(event, TrialDone) and event.row.config and event.row.outcome.time_us is not None:
                    times_us.setdefault(event.row.config, []).append(event.row.outcome.time_us)
                yield event
        batch = self.batch
        self.store.mark_complete(
            self.sweep_id, batch.version, self.request.laboratory.device, batch.problem, len(batch.trials)
        )

    def _round(self, lab: OpenLaboratory, number: int, trials: Sequence[Planned]) -> Iterator[Event]:
        known = self.known(number)
        positions = {trial.config: position for position, trial in enumerate(trials)}
        for config in positions:
            if config in known:
                yield TrialDone(self._row(config, known[config], number), from_database=True)
        todo = [trial for trial in trials if trial.config not in known]
        if (ceiling := lab.take_ceiling_gb_per_s()) is not None:
            self.store.record_ceiling(self.sweep_id, self.request.laboratory.device, ceiling)
        lab.compile(self.batch, todo)
        for done in lab.run(self.batch, todo, number):
            if isinstance(done, CompileProgress):
                yield done
                continue
            trial, outcome = done
            row = self._row(trial.config, outcome, number, positions[trial.config])
            self.store.add(self.sweep_id, row, once=True)
            yield TrialDone(row, from_database=False)

    def known(self, number: int) -> Mapping[NamedInts, Outcome]:
        """Outcomes of this round that need no new trial."""
        tried = self.store.tried(
            self.batch.version,
            self.request.laboratory.device,
            self.request.laboratory.kind,
            self.batch.problem,
            sweep=self.sweep_id if self.request.again else None,
            round=number,
        )
        return {
            trial.config: tried[trial.config]
            for trial in self.batch.trials
            if trial.config in tried and self._is_settled(trial, tried[trial.config])
        }

    def _is_settled(self, trial: Planned, outcome: Outcome) -> bool:
        """Whether a stored outcome stands: a config that was pruned and no longer is has yet to be tried."""
        if outcome.status is Status.PRUNED:
            return trial.pruned is not None
        return outcome.status is Status.OK or not self.request.retry_failed

    def unknown(self) -> list[Planned]:
        """Trials of the first round that have no row."""
        known = self.known(0)
        trials = [trial for trial in self.batch.trials if trial.config not in known]
        return _permuted(trials, self.batch.problem, self.request.seed, 0)

    def _row(self, config: NamedInts, outcome: Outcome, number: int, position: int = 0) -> Row:
        return Row(
            problem=self.batch.problem,
            config=config,
            device=self.request.laboratory.device,
            kind=self.request.laboratory.kind,
            outcome=outcome,
            version=self.batch.version,
            lookup_key=self.batch.lookup_key,
            bytes_moved=self.batch.bytes_moved,
            commit=self.request.commit,
            round=number,
            process=outcome.process,
            position=position,
        )


def _contenders(trials: Sequence[Planned], times_us: Mapping[NamedInts, Sequence[float]]) -> list[Planned]:
    """All trials before any was timed; then those that may still be the best."""
    if not times_us:
        return list(trials)
    best = min(median(times) for times in times_us.values())
    return [
        trial
        for trial in trials
        if trial.config in times_us and median(times_us[trial.config]) <= CONTENDER_RATIO * best
    ]


def _permuted(trials: list[Planned], problem: Problem, seed: int, number: int) -> list[Planned]:
    """A permutation that is the same for the same problem, seed and round: neighbours and drift hit every config."""
    random.Random(f"{seed} {number} {problem}").shuffle(trials)
    return trials
