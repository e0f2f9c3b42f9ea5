"""A sweep: the coarse pass of each problem size, then the confirmation of all of them.

The coarse pass of a problem size has rounds, each a seeded permutation: the first of every config, later ones of those
that may still be the best. If the grids do not fit the time budget, a search (:mod:`fp8tune.sweeping.search`) takes the
place of the first round. It only chooses the configs that are confirmed (:mod:`fp8tune.sweeping.confirmation`). A
trial that fails is a row with its reason. A trial that has a result is not run again, so that the same command
continues a sweep that was stopped.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from fp8tune.ceiling import FLOP_PER_S
from fp8tune.measure.arms import Place
from fp8tune.measure.engine import Ceiling, CompileProgress
from fp8tune.plan.problems import seed_text
from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune.stats.means import median
from fp8tune.store.results import Store
from fp8tune.sweeping import same_bits, search
from fp8tune.sweeping.confirmation import Confirmation
from fp8tune.sweeping.events import Event, Finished, RoundStarted, SizeDone, Started, TrialDone
from fp8tune.sweeping.planning import Plan, ProblemPlan

CONTENDER_RATIO = 1.3  # later rounds repeat only configs within this ratio of the best: the others cannot be the pick
MOST_CONTENDERS = 32  # of a search: later rounds repeat no more configs
TOGETHER_S = 1.0  # trials that come within this time are stored in one commit: others wait for the database's disk
COMPILE_AHEAD = 1000  # configs of the next problem sizes that are queued, so that compilers do not wait for the clock


def sweep(
    store: Store,
    plan: Plan,
    clock: Callable[[], float] = time.monotonic,
    *,
    begun: float | None = None,
    take: Callable[[bool], ProblemPlan | None] | None = None,
) -> Generator[Event, None, None]:
    """Run a plan. Closing the generator ends the workers; every stored row stays.

    Args:
        store: Database.
        plan: What is swept.
        clock: Seconds, for the time budget.
        begun: When the time budget began, if not now.
        take: Returns another problem size to sweep after the plan's, or None. Its argument is False if it would only
            be compiled beside the current one.
    """
    started, options, backend = clock(), plan.options, plan.backend
    deadline = (started if begun is None else begun) + (math.inf if options.budget_s is None else options.budget_s)
    sweep_id = store.begin_sweep(
        plan.key,
        plan.device,
        command=plan.command,
        commit=plan.commit,
        timer=backend.timer,
        seed=plan.settings.seed,
        again=options.again,
        limits=backend.limits,
    )
    _record_kernels(store, plan.problems, sweep_id)
    yield Started(backend.device, backend.kind, len(plan.problems), sum(problem.count for problem in plan.problems))
    confirmation = Confirmation(store, plan, sweep_id, clock, deadline)
    upcoming, passes = iter(plan.problems), list[_CoarsePass]()
    trials = index = 0
    size_s, share = plan.size_budget_s, search.SHARE if confirmation.is_wanted else search.QUICK_SHARE
    may_search = backend.times and take is None and not plan.is_partial  # of few configs, all are wanted
    is_search = may_search and search.is_needed(plan, plan.problems, share * (deadline - started))

    def counted(events: Iterable[Event]) -> Iterator[Event]:
        nonlocal trials
        for event in events:
            trials += isinstance(event, TrialDone)
            yield event

    def compile_ahead() -> None:
        """Queue the current problem size and the next ones for the compilers."""
        while (ahead := sum(coarse.queued for coarse in passes[index + 1 :])) < COMPILE_AHEAD:
            problem = next(upcoming, None)
            if problem is None and take is not None and not ahead and (problem := take(index == len(passes))):
                _record_kernels(store, [problem], sweep_id)
            if problem is None:
                return
            searches = is_search or (size_s is not None and search.is_needed(plan, [problem], share * size_s))
            kind = _SearchPass if searches else _CoarsePass
            passes.append(kind(store, plan, sweep_id, problem, len(passes)))

    with contextlib.closing(backend), store.adding_together(TOGETHER_S):
        compile_ahead()
        if is_search:
            yield from counted(_visits(passes, started + share * (deadline - started), clock))
        while index < len(passes) and clock() <= deadline:
            work = passes[index].run(lambda: clock() > deadline)
            if size_s is not None:
                work = chain(_visits(passes[index : index + 1], min(clock() + share * size_s, deadline), clock), work)
            yield from counted(work)
            if passes[index].is_done and not confirmation.is_wanted:
                confirmation.withdraw(passes[index].problem)
                yield SizeDone(passes[index].problem.problem)
            index += 1
            compile_ahead()
        coarse: list[same_bits.Coarse] = [(one_pass.problem, one_pass.times_us) for one_pass in passes]
        if index == len(passes) and options.same_bits and backend.times:
            coarse = same_bits.with_finalists(store, plan, coarse, options.same_bits)
        if index == len(passes) and confirmation.is_wanted:
            yield from counted(confirmation.run(coarse))
        left_out = confirmation.left_out or sum(coarse.left_out() for coarse in passes if not coarse.is_done)
        left_out += sum(problem.count for problem in upcoming)
        is_whole = all(coarse.is_done for coarse in passes) and not left_out and not confirmation.is_incomplete
        if is_whole:
            store.finish_sweep(sweep_id)
    searches = [coarse for coarse in passes if isinstance(coarse, _SearchPass)]
    seen, grid = sum(coarse.seen for coarse in searches), sum(coarse.search.valid for coarse in searches)
    yield Finished(trials, clock() - started, left_out, is_whole, seen, max(seen, grid))


def _visits(passes: Sequence[_CoarsePass], until: float, clock: Callable[[], float]) -> Iterator[Event]:
    """Search on each problem size several times, so that each learns from the others."""
    searches = [coarse for coarse in passes if isinstance(coarse, _SearchPass)]
    visits = min(search.VISITS, max(1, int((until - clock()) / (search.LEAST_VISIT_S * max(len(searches), 1)))))
    for left in range(visits * len(searches), 0, -1):
        coarse, begun = searches[-left % len(searches)], clock()
        end = begun + (until - begun) / left
        yield from coarse.visit(end, clock)


def _record_kernels(store: Store, sizes: Sequence[ProblemPlan], sweep_id: int) -> None:
    """Store by which check and reference each kernel is right, operations, and the launches of recorded problems."""
    for size in {size.reference: size for size in sizes}.values():
        spec = load_spec(size.reference)
        if size.reference_hash:
            store.record_reference(sweep_id, size.version, size.reference_hash)
            store.record_check(sweep_id, size.version, spec.check_text)
        if isinstance(spec, RecordedSpec):
            problems = [alike.problem for alike in sizes if alike.reference == size.reference]
            store.record_launches({problem: text for problem in problems if (text := spec.document(problem))})
    if flops := {size.problem: size.flops for size in sizes if size.flops is not None}:
        store.record_flops(flops)


@dataclass
class _CoarsePass:
    """The coarse pass of one problem size."""

    store: Store
    plan: Plan
    sweep_id: int
    problem: ProblemPlan
    index: int
    times_us: dict[NamedInts, list[float]] = field(default_factory=dict)  # block values, the rounds in order
    tried: dict[NamedInts, float | None] = field(default_factory=dict)  # times of the first round, None for failures
    is_done: bool = False
    first_round: ClassVar[int] = 0

    def __post_init__(self) -> None:
        self.read()
        known, configs = self.known.get(0, {}), self.problem.configs
        todo = [config for config in self._permuted([*configs], 0) if config not in known and not configs[config]]
        self.plan.backend.compile([self.problem.arm(config) for config in todo])
        self.queued = len(todo)  # configs that were given to the compilers

    def read(self) -> None:
        """Read the results that need no new trial, by round."""
        rounds = self.store.tried_in_rounds(
            self.plan.subject(self.problem),
            sweep=self.sweep_id if self.plan.options.again else None,
            reference=self.problem.reference_hash,
            limits=self.plan.backend.limits,
        )
        self.known_at, configs = self.store.changes, self.problem.configs

        def counts(config: NamedInts, outcome: Outcome) -> bool:  # a config may be pruned no longer
            return config in configs and (outcome.status is not Status.PRUNED or bool(configs[config]))

        self.known: Mapping[int, Mapping[NamedInts, Outcome]] = {
            round: {config: outcome for config, outcome in outcomes.items() if counts(config, outcome)}
            for round, outcomes in rounds.items()
        }

    def run(self, is_over: Callable[[], bool]) -> Iterator[Event]:
        """Run all rounds; stored results come first in each."""
        if self.known_at != self.store.changes:  # another process stored something
            self.read()
        rounds = self.plan.coarse_rounds if self.plan.backend.times else 1
        for round in range(self.first_round, rounds):
            configs = self._permuted(self._contenders() if round else [*self.problem.configs], round)
            yield RoundStarted(self.problem.problem, self.index, round, rounds, len(configs))
            yield from self._round(round, configs, is_over)
            if is_over():
                self.read()
                if not set(configs) <= self.known.get(round, {}).keys():
                    return
        self.is_done = self.seen > 0
        if self.is_done and not self.plan.is_partial:
            self.store.mark_complete(self.sweep_id, self.plan.subject(self.problem), self.seen)

    @property
    def seen(self) -> int:
        """Number of configs that have a result once all rounds are over."""
        return len(self.problem.configs)

    def _contenders(self) -> list[NamedInts]:
        """Return the configs that may still be the best, and those that launches use: no single block drops these."""
        problem, limit_us = self.problem, CONTENDER_RATIO * min(map(median, self.times_us.values()), default=math.inf)
        in_use = {problem.current, problem.fallback, problem.today.config if problem.today else None}
        times = ((config, self.times_us[config]) for config in problem.configs if config in self.times_us)
        return [config for config, blocks in times if config in in_use or median(blocks) <= limit_us]

    def _round(self, round: int, configs: Sequence[NamedInts], is_over: Callable[[], bool]) -> Iterator[Event]:
        known, pruned = self.known.get(round, {}), self.problem.configs
        for config in configs:
            if config in known:
                yield self._done(config, known[config], Place(round=round), from_database=True)
        places = {
            config: Place(round=round, position=position)
            for position, config in enumerate(configs)
            if config not in known
        }
        for config in [config for config in places if pruned[config]]:
            yield self._done(config, Outcome(Status.PRUNED, reason=pruned[config]), places.pop(config))
        todo, device, backend = list(places), self.plan.backend.device, self.plan.backend
        for result in backend.screen([self.problem.arm(config) for config in todo], [*places.values()], is_over):
            match result:
                case CompileProgress():
                    yield result
                case Ceiling("", gb_per_s):
                    self.store.record_ceiling(self.sweep_id, device, gb_per_s)
                case Ceiling(in_dtype, flop_per_s):
                    self.store.record_calibration(self.sweep_id, device, FLOP_PER_S + in_dtype, flop_per_s)
                case (number, outcome):
                    yield self._done(todo[number], outcome, places[todo[number]])

    def _done(self, config: NamedInts, outcome: Outcome, place: Place, *, from_database: bool = False) -> TrialDone:
        row = self.plan.row(self.problem, config, outcome, place, outcome.process)
        if not from_database:
            self.store.add_soon(self.sweep_id, row)
        if outcome.time_us is not None:
            self.times_us.setdefault(config, []).append(outcome.time_us)
        if not place.round:
            self.tried[config] = outcome.time_us
        return TrialDone(row, from_database=from_database)

    def left_out(self) -> int:
        """Return the number of configs without a result."""
        self.read()
        return len(self.problem.configs.keys() - self.known.get(0, {}).keys())

    def _permuted(self, configs: Sequence[NamedInts], round: int) -> list[NamedInts]:
        return self.plan.permuted(configs, round, seed_text(self.problem.problem))


@dataclass
class _SearchPass(_CoarsePass):
    """A coarse pass whose first round is a search."""

    first_round: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.read()
        self.search, self.queued = search.Search(self.store, self.plan, self.problem), 0
        # Processes of a confirmation time all finalists: another config cannot join those that have begun.
        self.is_closed = bool(self.store.finals(self.plan.subject(self.problem), self.sweep_id))

    @property
    def seen(self) -> int:
        """Number of configs that were tried."""
        return len(self.tried)

    def visit(self, until: float, clock: Callable[[], float]) -> Iterator[Event]:
        """Try batches of configs until a moment."""

        def is_over() -> bool:
            return clock() > until

        self.read()
        self.search.read()
        known = [config for config in self.known.get(0, {}) if config not in self.tried]
        yield RoundStarted(self.problem.problem, self.index, 0, self.plan.coarse_rounds, self.problem.count)
        yield from self._round(0, [config for config in known if not self.problem.configs[config]], is_over)
        while not (is_over() or self.is_closed):
            slowest_us = max((time_us for time_us in self.tried.values() if time_us is not None), default=1.0)
            own = {config: time_us or slowest_us for config, time_us in self.tried.items()}
            if not (batch := self.search.batch(own, self.tried)):
                return
            yield from self._round(0, batch, is_over)

    def _contenders(self) -> list[NamedInts]:
        by_time = sorted(self.times_us, key=lambda config: (median(self.times_us[config]), config.canonical))
        in_use = [config for config in self.problem.always if config in self.times_us]
        return [*dict.fromkeys([*by_time[:MOST_CONTENDERS], *in_use])]

    def left_out(self) -> int:
        """Return the number of configs that later rounds would time."""
        return max(len(self._contenders()), 1)
