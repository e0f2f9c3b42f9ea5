"""The confirmation of a sweep: finalists of each problem size on fresh data from fresh processes.

All problem sizes share the processes (:mod:`fp8tune.measure.engine`). The default config runs under two names, which
shows the noise. Rows of one process on one problem size count only together and are committed together, so that a
stopped sweep continues with the next process. After so many processes each problem size is decided, and those that are
still open get more. If the time budget ends before, the last decision stands until the same command continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fp8tune.measure.arms import KernelArm
from fp8tune.measure.engine import Group, Schedule, Turn, measure
from fp8tune.plan.problems import seed_text
from fp8tune.records import ClockLimits, FinalsRun, NamedInts, Status
from fp8tune.stats.decide import PLAN, decide_finals, floor_us
from fp8tune.stats.pairs import Finals
from fp8tune.stats.screen import choose_finalists
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.sweeping.events import ConfirmationSkipped, ConfirmationStarted, Event, SizeDone, TrialDone
from fp8tune.sweeping.planning import Plan, ProblemPlan

Finalists = Group[KernelArm, ProblemPlan]
"""Finalists of one problem size, less those that failed in the confirmation, and the default twice."""


class Confirmation:
    """The confirmation of one sweep."""

    def __init__(
        self, store: Store, plan: Plan, sweep_id: int, clock: Callable[[], float], deadline: float = math.inf
    ) -> None:
        self.store, self.plan, self.sweep_id, self.clock, self.deadline = store, plan, sweep_id, clock, deadline
        self.is_wanted = plan.backend.times and not plan.options.quick
        self.left_out = 0  # trials, without those of processes that might have been added
        self.is_incomplete = False  # the tensors of a problem size could not be built
        self.decisions = plan.processes  # processes after which problem sizes are decided
        self._uid = store.sweep_uid(sweep_id)
        self._turn_s = 0.0

    def run(self, coarse: Iterable[tuple[ProblemPlan, Mapping[NamedInts, Sequence[float]]]]) -> Iterator[Event]:
        """Confirm problem sizes, each given with its configs' block values in microseconds, the rounds in order."""
        chosen = [self._finalists(problem, times_us) for problem, times_us in coarse]
        studies = [item for item in self.store.studies(problems={g.subject.problem for g in chosen}) if item.finals]
        pending, decided = list[Finalists](), 0
        for group in chosen:
            stored = [study.finals for study in studies if self._is_of(group.subject, study)]
            if self._is_confirmed(group, stored[-1] if stored else {}):
                yield SizeDone(group.subject.problem)
            else:
                pending.append(group)
        for decision, processes in enumerate(self.decisions, start=1):
            yield from self._timed(pending, processes, decision)
            timed, pending = pending, []
            for group in timed:
                if not group.failure and self._is_settled(group, processes):
                    yield SizeDone(group.subject.problem)
                elif not group.failure:
                    pending.append(group)
            if self.left_out:
                for group in pending:
                    if decided and set(_numbers(decided)) <= group.processes:
                        self._end(group)
                return
            decided = processes
        yield from (SizeDone(group.subject.problem) for group in pending)  # all finalists have failed

    def withdraw(self, problem: ProblemPlan) -> None:
        """End an older confirmation at other clock or power limits: the coarse pass at these replaces it."""
        is_unknown = self.plan.backend.limits == ClockLimits()
        studies = () if is_unknown else self.store.studies(problems={problem.problem})
        if any(self._has_other_limits(study.finals) for study in studies if self._is_of(problem, study)):
            run = FinalsRun(self._uid, PLAN.tie_band, PLAN.keep_band, 0.0)
            self.store.end_finals(self.sweep_id, self.plan.subject(problem), run)

    def _has_other_limits(self, times: Finals) -> bool:
        limits = self.plan.backend.limits
        return any(limits.difference(self.store.limits_of(sweep)) for sweep in _sweeps(times))

    def _is_of(self, problem: ProblemPlan, study: Study) -> bool:
        is_same = (study.problem, study.source_hash) == (problem.problem, problem.version.source_hash)
        return is_same and study.device == self.plan.device_of(problem)

    def _finalists(self, problem: ProblemPlan, times_us: Mapping[NamedInts, Sequence[float]]) -> Finalists:
        tried = self.store.tried(self.plan.subject(problem), sweep=self.sweep_id, stage="final")
        failed = {config for config, outcome in tried.items() if outcome.status is not Status.OK}
        configs = choose_finalists(times_us, problem.version.axes, problem.always, PLAN)
        arms = [problem.arm(config) for config in configs if config not in failed]
        arms += [replace(arm, duplicate=True) for arm in arms if arm.config == problem.version.default]
        timed = self.store.finals(self.plan.subject(problem), self.sweep_id)
        names = [{times.process for times in timed.get(arm.config, [])} for arm in arms if not arm.duplicate]
        done = set.intersection(*names) if names else set()
        return Group(problem, arms, {number for number in _numbers(self.decisions[-1]) if process_name(number) in done})

    def _is_confirmed(self, group: Finalists, times: Finals) -> bool:
        """Return True if there are no finalists, or if all have rows that no time budget cut short."""
        configs = _configs(group)
        if not configs or not set(configs) <= times.keys():
            return not configs
        has_own = self._uid in _sweeps(times)
        if self._has_other_limits(times) or (self.plan.options.again and not has_own):
            return False
        return not (has_own and len(group.processes) < self.decisions[-1] and self._is_open(group, times))

    def _timed(self, groups: Sequence[Finalists], processes: int, decision: int) -> Iterator[Event]:
        """Time each problem size in processes until so many have timed it."""
        if groups:
            yield ConfirmationStarted(len(groups), processes, self._missing(groups, processes), decision)

        def is_over() -> bool:  # a turn cannot be interrupted: the next may take as long as the last
            return self.clock() + self._turn_s > self.deadline

        schedule = Schedule(_numbers(processes), self.plan.rounds, self._order, is_over=is_over)
        begun = self.clock()
        for turn in measure(self.plan.backend, groups, schedule):
            self._turn_s, begun = (ended := self.clock()) - begun, ended
            yield from self._stored(turn)
        self.left_out = self._missing(groups, processes)

    def _missing(self, groups: Sequence[Finalists], processes: int) -> int:
        blocks = ((group, sum(map(group.wants, _numbers(processes)))) for group in groups)
        return sum(count * self.plan.rounds * len(group.arms) for group, count in blocks)

    def _order(self, group: Finalists, process: int, round: int) -> list[KernelArm]:
        return self.plan.permuted(group.arms, "final", process - 1, round, seed_text(group.subject.problem))

    def _stored(self, turn: Turn[KernelArm, ProblemPlan]) -> Iterator[Event]:
        if turn.group.failure:
            self.is_incomplete = True
            yield ConfirmationSkipped(turn.group.subject.problem, turn.group.failure)
            return
        rows = []
        for block in (*turn.failed, *turn.blocks):
            stage = "duplicate" if block.arm.duplicate and block.outcome.status is Status.OK else "final"
            name, config = process_name(turn.process), block.arm.config
            rows.append(self.plan.row(turn.group.subject, config, block.outcome, block.place, name, stage))
        self.store.add_many(self.sweep_id, rows)
        yield from (TrialDone(row, from_database=False) for row in rows)

    def _is_settled(self, group: Finalists, processes: int) -> bool:
        """Decide a problem size that so many processes timed. True, and noted in the database, if they are enough."""
        counted = set(_numbers(processes))
        if not counted <= group.processes:
            return False
        run, names = self._run_of(group), {process_name(number) for number in counted}
        timed = self.store.finals(self.plan.subject(group.subject), self.sweep_id)
        times = {
            config: [t.of_run(run) for t in timed.get(config, []) if t.stage == "final" and t.process in names]
            for config in _configs(group)
        }
        if any(times.values()) and processes < self.decisions[-1] and self._is_open(group, times):
            return False
        self._end(group)
        return True

    def _is_open(self, group: Finalists, times: Finals) -> bool:
        problem, version = group.subject, group.subject.version
        decision = decide_finals(times, current=problem.current, default=version.default, axes=version.axes)
        return decision.needs_more

    def _run_of(self, group: Finalists) -> FinalsRun:
        tick_us = self.store.tick_us(self.plan.subject(group.subject), self.sweep_id)
        return FinalsRun(self._uid, PLAN.tie_band, PLAN.keep_band, floor_us(tick_us))

    def _end(self, group: Finalists) -> None:
        self.store.end_finals(self.sweep_id, self.plan.subject(group.subject), self._run_of(group))
        if self.plan.is_partial:
            self.store.mark_complete(self.sweep_id, self.plan.subject(group.subject), len(group.subject.configs))


def _configs(group: Finalists) -> list[NamedInts]:
    return [arm.config for arm in group.arms if not arm.duplicate]


def _sweeps(times: Finals) -> set[str]:
    return {process.run.sweep for processes in times.values() for process in processes}


def _numbers(processes: int) -> range:
    """Return the numbers of so many processes; number 0 is that of the coarse pass."""
    return range(1, processes + 1)


def process_name(number: int) -> str:
    """Return the name of a process from 1: the same when the sweep continues, and unique in it."""
    return f"final {number - 1:02d}"
