"""plan -> compile -> check -> screen -> finals -> store: rows as they come, and an event for whoever shows them.

Each problem is screened in rounds, every round a seeded permutation: the first has every config, the later ones those
within 1.3x of the best so far and what the committed table holds. The screen chooses who enters the finals
(:mod:`fp8tune.sweep.finals`) and nothing else.
A trial that fails is a row with its reason; the sweep goes on. Whatever already has a row is not run again, so that the
same command continues a sweep that was stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8tune.choose.decision import MeasuringPlan
from fp8tune.measure.laboratory import Batch, CompileProgress, Laboratory, OpenLaboratory
from fp8tune.measure.machine import is_machines
from fp8tune.plan.problems import Planned
from fp8tune.records import KernelVersion, NamedInts, Outcome, Problem, Row, Status, Subject
from fp8tune.stats import median
from fp8tune.store.results import Store
from fp8tune.sweep.events import (
    Added,
    Event,
    FinalsStarted,
    Finished,
    NoFinals,
    Request,
    Started,
    TrialDone,
)
from fp8tune.sweep.finals import Finals, rows_of

__all__ = [
    "Added",
    "Event",
    "FinalsStarted",
    "Finished",
    "NoFinals",
    "Request",
    "Started",
    "TrialDone",
    "recall",
    "sweep",
]

ROUNDS = MeasuringPlan().screen_rounds
CONTENDER_RATIO = 1.3
"""Later rounds repeat only configs within this ratio of the best: the others cannot be the pick."""


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
    for version, judge in {batch.version: batch.judge for batch in request.batches if batch.judge}.items():
        store.record_reference(sweep_id, version, judge)
    screens = [_Screen(store, request, batch, sweep_id) for batch in request.batches]
    planned = sum(len(batch.trials) for batch in request.batches)
    yield Started(request.laboratory.device, planned, sum(len(screen.known(0)) for screen in screens))
    deadline = math.inf if request.time_budget_s is None else begun + request.time_budget_s
    with OpenLaboratory(request.laboratory, request.trial_timeout_s) as lab:
        for screen in screens:
            if unknown := screen.unknown():
                lab.compile(screen.batch, unknown)
                lab.warm_up(screen.batch)
        finals = Finals(store, request, sweep_id, lab, deadline)
        trials = 0
        for event in _stages(screens, finals, lab, deadline):
            trials += isinstance(event, TrialDone)
            yield event
        left_out = finals.left_out or sum(len(screen.unknown()) for screen in screens if not screen.is_done)
        if all(screen.is_done for screen in screens) and not left_out and not finals.skipped:
            store.finish_sweep(sweep_id)
    yield Finished(trials, time.monotonic() - begun, left_out)


def _stages(screens: Sequence[_Screen], finals: Finals, lab: OpenLaboratory, deadline: float) -> Iterator[Event]:
    """The screens of all problems, then their finals; stops where the time is up."""
    for screen in screens:
        if time.monotonic() > deadline:
            return
        yield from screen.run(lab)
    if finals.request.finals and lab.lab.times:
        yield from finals.run((screen.batch, screen.times_us) for screen in screens)


def recall(
    store: Store, lab: Laboratory, problems: Sequence[tuple[KernelVersion, Problem]], *, finals: bool = False
) -> Iterator[Event]:
    """The events of a finished sweep from its rows alone: nothing is planned, no worker starts."""
    begun = time.monotonic()
    rows: list[Row] = []
    for version, problem in problems:
        for number in range(ROUNDS if lab.times else 1):
            tried = store.tried(Subject(version, lab.device, lab.kind, problem), round=number)
            rows += [
                Row(problem, config, lab.device, lab.kind, tried[config], version, round=number) for config in tried
            ]
    if lab.times and finals:
        wanted = {(problem, version.source_hash) for version, problem in problems}
        stored = store.evidence(problems={problem for _, problem in problems}, device=lab.device)
        rows += rows_of(item for item in stored if item.version and (item.problem, item.version.source_hash) in wanted)
    yield Started(lab.device, len(rows), len(rows))
    for row in rows:
        yield TrialDone(row, from_database=True)
    yield Finished(len(rows), time.monotonic() - begun)


@dataclass
class _Screen:
    """One problem's rounds."""

    store: Store
    request: Request
    batch: Batch
    sweep_id: int
    times_us: dict[NamedInts, list[float]] = field(default_factory=dict)
    """Block values in microseconds, the rounds in order."""
    is_done: bool = False

    def run(self, lab: OpenLaboratory) -> Iterator[Event]:
        """All rounds of the problem, with what is stored already in its place."""
        for number in range(ROUNDS if self.request.laboratory.times else 1):
            trials = self._permuted(_contenders(self.batch.trials, self.times_us, self._committed), number)
            if number and trials:
                yield Added(len(trials))
            for event in self._round(lab, number, trials):
                if isinstance(event, TrialDone) and event.row.config and event.row.outcome.time_us is not None:
                    self.times_us.setdefault(event.row.config, []).append(event.row.outcome.time_us)
                yield event
        self.is_done = True
        self.store.mark_complete(self.sweep_id, self.request.subject(self.batch), len(self.batch.trials))

    @property
    def _committed(self) -> set[NamedInts | None]:
        """The committed table's configs for this problem and for any other shape: no single block puts them out."""
        return {self.request.incumbents.get(self.batch.problem), self.request.fallbacks.get(self.batch.version.kernel)}

    def _round(self, lab: OpenLaboratory, number: int, trials: Sequence[Planned]) -> Iterator[Event]:
        known = self.known(number)
        positions = {trial.config: position for position, trial in enumerate(trials)}
        for config in positions:
            if config in known:
                yield TrialDone(self._row(config, known[config], number), from_database=True)
        todo = {trial: positions[trial.config] for trial in trials if trial.config not in known}
        if (ceiling := lab.take_ceiling_gb_per_s()) is not None:
            self.store.record_ceiling(self.sweep_id, self.request.laboratory.device, ceiling)
        lab.compile(self.batch, list(todo))
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
            self.request.subject(self.batch),
            sweep=self.sweep_id if self.request.again else None,
            round=number,
            reference=self.batch.judge,
        )
        return {
            trial.config: tried[trial.config]
            for trial in self.batch.trials
            if trial.config in tried and self._is_settled(trial, tried[trial.config])
        }

    def _is_settled(self, trial: Planned, outcome: Outcome) -> bool:
        """Whether a stored outcome stands: a config that was pruned and no longer is has yet to be tried; so has one
        that a full disk refused."""
        if outcome.status is Status.PRUNED:
            return trial.pruned is not None
        if is_machines(outcome.reason):
            return False
        return outcome.status is Status.OK or not self.request.retry_failed

    def unknown(self) -> list[Planned]:
        """Trials of the first round that have no row."""
        known = self.known(0)
        trials = [trial for trial in self.batch.trials if trial.config not in known]
        return self._permuted(trials, 0)

    def _permuted(self, trials: Sequence[Planned], number: int) -> list[Planned]:
        return self.request.permuted(trials, number, self.batch.problem)

    def _row(self, config: NamedInts, outcome: Outcome, number: int, position: int = 0) -> Row:
        return self.request.row(self.batch, config, outcome, process=outcome.process, round=number, position=position)


def _contenders(
    trials: Sequence[Planned], times_us: Mapping[NamedInts, Sequence[float]], always: Collection[NamedInts | None]
) -> list[Planned]:
    """All trials before any was timed; then those that may still be the best, and ``always``."""
    if not times_us:
        return list(trials)
    best = min(median(times) for times in times_us.values())
    return [
        trial
        for trial in trials
        if trial.config in times_us
        and (trial.config in always or median(times_us[trial.config]) <= CONTENDER_RATIO * best)
    ]
