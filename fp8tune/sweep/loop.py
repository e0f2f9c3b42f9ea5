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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8tune.ceiling import FLOP_PER_S
from fp8tune.measure.arms import Place
from fp8tune.measure.engine import CompileProgress, ComputeCeiling, CopyCeiling
from fp8tune.measure.machine import is_machines
from fp8tune.plan.problems import seed_text
from fp8tune.records import KernelVersion, Kind, NamedInts, Outcome, Problem, Row, Status, Subject
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune.stats.decide import MeasuringPlan
from fp8tune.stats.means import median
from fp8tune.store.results import Store
from fp8tune.sweep.events import (
    Added,
    Ahead,
    Event,
    FinalsStarted,
    Finished,
    NoFinals,
    RoundStarted,
    Started,
    TrialDone,
)
from fp8tune.sweep.finals import Finals, rows_of
from fp8tune.sweep.planning import Plan, ProblemPlan

__all__ = ["Added", "Event", "FinalsStarted", "Finished", "NoFinals", "Started", "TrialDone", "replay", "sweep"]

ROUNDS = MeasuringPlan().screen_rounds
CONTENDER_RATIO = 1.3
"""Later rounds repeat only configs within this ratio of the best: the others cannot be the pick."""

FRESH_S = 1.0
"""Seconds until a fresh process has a GPU and times its first block: 24 sweeps on H100 and H200."""


def sweep(
    store: Store, plan: Plan, clock: Callable[[], float] = time.monotonic, *, begun: float | None = None
) -> Iterator[Event]:
    """Run a plan, storing as it goes. Closing the generator ends the workers and keeps every stored row.

    ``clock``: seconds, which a time budget is counted in; ``begun``: when it began, if not now.
    """
    started, options, backend = clock(), plan.options, plan.backend
    budget_s = math.inf if options.time_budget_s is None else options.time_budget_s
    deadline = budget_s + (started if begun is None else begun)
    sweep_id = store.begin_sweep(
        plan.key,
        backend.device,
        command=options.command,
        commit=plan.commit,
        timer=backend.timer,
        seed=options.seed,
        again=options.again,
    )
    for version, reference in {of.version: of.reference_hash for of in plan.problems if of.reference_hash}.items():
        store.record_reference(sweep_id, version, reference)
    _record_kernels(store, plan, sweep_id)
    if flops := {of.problem: of.flops for of in plan.problems if of.flops is not None}:
        store.record_flops(flops)
    finals, moment = Finals(store, plan, sweep_id, clock, deadline), store.changes
    screens = [_Screen(store, plan, of, sweep_id, finals) for of in plan.problems]
    trials = sum(len(of.configs) for of in plan.problems)
    ahead = _ahead(screens, finals, deadline - clock())
    yield Started(backend.device, trials, sum(len(screen.known(0)) for screen in screens), ahead)
    try:
        for screen in screens:
            backend.compile([screen.plan.arm(config) for config in screen.todo(screen.unknown())])
        trials = 0
        for event in _stages(screens, finals, lambda: store.changes != moment):
            trials += isinstance(event, TrialDone)
            yield event
        left_out = finals.left_out or sum(screen.left_out() for screen in screens if not screen.is_done)
        is_whole = all(screen.is_done for screen in screens) and not left_out and not finals.is_skipped
        if is_whole:
            store.finish_sweep(sweep_id)
    finally:
        backend.close()
    yield Finished(trials, clock() - started, left_out, is_whole)


def _ahead(screens: Sequence[_Screen], finals: Finals, left_s: float) -> Ahead:
    """``left_s``: seconds that the time budget leaves."""
    backend, numbers = finals.plan.backend, finals.numbers
    return Ahead(
        kind=backend.kind,
        trials={of.plan.problem: count for of in screens if (count := len(of.todo(of.unknown())))},
        rounds=ROUNDS if backend.times else 1,
        judged_after=finals.judged_after if finals.are_wanted else (),
        blocks=numbers.rounds,
        finalists=numbers.finalists,
        fresh_s=FRESH_S if backend.kind is Kind.MEASURED else 0.0,
        budget_s=None if left_s == math.inf else left_s,
    )


def _record_kernels(store: Store, plan: Plan, sweep_id: int) -> None:
    """Keep by which check each kernel is right, and the launches that recorded problems stand for."""
    for reference, version in {of.reference: of.version for of in plan.problems}.items():
        spec = load_spec(reference)
        if plan.backend.kind in (Kind.MEASURED, Kind.INTERPRETER):
            store.record_check(sweep_id, version, spec.check_text)
        if isinstance(spec, RecordedSpec):
            problems = [of.problem for of in plan.problems if of.reference == reference]
            store.record_launches({problem: text for problem in problems if (text := spec.document(problem))})


def _stages(screens: Sequence[_Screen], finals: Finals, is_changed: Callable[[], bool]) -> Iterator[Event]:
    """The screens of all problems, then their finals; stops where the time is up.

    ``is_changed``: whether another process stored something since the screens were read.
    """
    for place, screen in enumerate(screens):
        if finals.is_over():
            return
        if place and is_changed():
            screen.read()
        yield from screen.run()
    if finals.are_wanted:
        yield from finals.run((screen.plan, screen.times_us) for screen in screens)


def replay(store: Store, plan: Plan, problems: Sequence[tuple[KernelVersion, Problem]]) -> Iterator[Event]:
    """The events of a finished sweep from its rows alone: nothing is planned, no worker starts."""
    begun, device, kind = time.monotonic(), plan.backend.device, plan.backend.kind
    rows: list[Row] = []
    for version, problem in problems:
        found = store.tried_in_rounds(Subject(version, device, kind, problem))
        for number in range(ROUNDS if plan.backend.times else 1):
            tried = found.get(number, {})
            rows += [Row(problem, config, device, kind, tried[config], version, round=number) for config in tried]
    if plan.backend.times and not plan.options.quick:
        wanted = {(problem, version.source_hash) for version, problem in problems}
        stored = store.evidence(problems={problem for _, problem in problems}, device=device)
        rows += rows_of(item for item in stored if item.version and (item.problem, item.version.source_hash) in wanted)
    yield Started(device, len(rows), len(rows))
    for row in rows:
        yield TrialDone(row, from_database=True)
    yield Finished(len(rows), time.monotonic() - begun)


@dataclass
class _Screen:
    """One problem's rounds."""

    store: Store
    sweep: Plan
    plan: ProblemPlan
    sweep_id: int
    finals: Finals
    times_us: dict[NamedInts, list[float]] = field(default_factory=dict)
    """Block values in microseconds, the rounds in order."""
    is_done: bool = False
    _known: Mapping[int, Mapping[NamedInts, Outcome]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read()

    def read(self) -> None:
        """Ask what is stored: of all rounds, for each question costs as much as a trial."""
        tried = self.store.tried_in_rounds(
            self.sweep.subject(self.plan),
            sweep=self.sweep_id if self.sweep.options.again else None,
            reference=self.plan.reference_hash,
        )
        self._known = {
            number: {c: found[c] for c in self.plan.configs if c in found and self._stands(c, found[c])}
            for number, found in tried.items()
        }

    def run(self) -> Iterator[Event]:
        """All rounds of the problem, with what is stored already in its place."""
        for number in range(ROUNDS if self.sweep.backend.times else 1):
            # what launches use stays in: no single block puts it out
            in_use = {self.plan.current, self.plan.fallback, self.plan.today.config if self.plan.today else None}
            contenders = _contenders(self.plan.configs, self.times_us, in_use) if number else self.plan.configs
            configs = self._permuted(contenders, number)
            if number and configs:
                yield Added(len(configs))
            known = self.known(number)
            todo = self.todo(config for config in configs if config not in known)
            yield RoundStarted(self.plan.problem, number, ROUNDS if self.sweep.backend.times else 1, len(todo))
            for event in self._round(number, configs):
                if isinstance(event, TrialDone) and event.row.config and event.row.outcome.time_us is not None:
                    self.times_us.setdefault(event.row.config, []).append(event.row.outcome.time_us)
                yield event
            if self.finals.is_over() and self._is_cut_short(number, configs):
                return
        self.is_done = True
        self.store.mark_complete(self.sweep_id, self.sweep.subject(self.plan), len(self.plan.configs))
        if self.finals.are_wanted:
            yield self.finals.ahead(self.plan, self.times_us)

    def _round(self, number: int, configs: Sequence[NamedInts]) -> Iterator[Event]:
        known = self.known(number)
        for config in configs:
            if config in known:
                yield TrialDone(self._row(config, known[config], Place(round=number)), from_database=True)
        places = {config: Place(round=number, position=position) for position, config in enumerate(configs)}
        todo = [config for config in configs if config not in known]
        for config in todo:
            if reason := self.plan.configs[config]:
                yield self._stored(config, Outcome(Status.PRUNED, reason=reason), places[config])
        todo = self.todo(todo)
        arms = [self.plan.arm(config) for config in todo]
        screened = self.sweep.backend.screen(arms, [places[config] for config in todo], self.finals.is_over)
        for done in screened:
            match done:
                case CompileProgress():
                    yield done
                case CopyCeiling(gb_per_s):
                    self.store.record_ceiling(self.sweep_id, self.sweep.backend.device, gb_per_s)
                case ComputeCeiling(in_dtype, flop_per_s):
                    name = FLOP_PER_S + in_dtype
                    self.store.record_calibration(self.sweep_id, self.sweep.backend.device, name, flop_per_s)
                case (index, outcome):
                    yield self._stored(todo[index], outcome, places[todo[index]])

    def _is_cut_short(self, number: int, configs: Sequence[NamedInts]) -> bool:
        """Whether the time budget ended a round."""
        self.read()
        return not set(configs) <= self.known(number).keys()

    def _stored(self, config: NamedInts, outcome: Outcome, place: Place) -> TrialDone:
        row = self._row(config, outcome, place)
        self.store.add_soon(self.sweep_id, row)
        return TrialDone(row, from_database=False)

    def known(self, number: int) -> Mapping[NamedInts, Outcome]:
        """Outcomes of this round that need no new trial."""
        return self._known.get(number, {})

    def _stands(self, config: NamedInts, outcome: Outcome) -> bool:
        """Whether a stored outcome counts. Not of a config that was pruned and no longer is, nor of a full disk."""
        if outcome.status is Status.PRUNED:
            return bool(self.plan.configs[config])
        if is_machines(outcome.reason):
            return False
        return outcome.status is Status.OK or not self.sweep.options.retry_failed

    def unknown(self) -> list[NamedInts]:
        """Configs that have no row of the first round."""
        known = self.known(0)
        return self._permuted((config for config in self.plan.configs if config not in known), 0)

    def left_out(self) -> int:
        """Configs that have none now."""
        self.read()
        return len(self.unknown())

    def todo(self, configs: Iterable[NamedInts]) -> list[NamedInts]:
        """Those that are not pruned."""
        return [config for config in configs if not self.plan.configs[config]]

    def _permuted(self, configs: Iterable[NamedInts], number: int) -> list[NamedInts]:
        return self.sweep.permuted(configs, number, seed_text(self.plan.problem))

    def _row(self, config: NamedInts, outcome: Outcome, place: Place) -> Row:
        return self.sweep.row(self.plan, config, outcome, place, outcome.process)


def _contenders(
    configs: Iterable[NamedInts], times_us: Mapping[NamedInts, Sequence[float]], always: Collection[NamedInts | None]
) -> list[NamedInts]:
    """Those that may still be the best, and ``always``: none where none could be timed."""
    limit_us = CONTENDER_RATIO * min((median(times) for times in times_us.values()), default=math.inf)
    return [c for c in configs if c in times_us and (c in always or median(times_us[c]) <= limit_us)]
