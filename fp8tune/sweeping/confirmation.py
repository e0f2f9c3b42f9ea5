"""The confirmation of a sweep: finalists of each problem size on fresh data from fresh processes.

All problem sizes share the processes (:mod:`fp8tune.measure.engine`). The default config runs under two names, which
shows the noise. Rows of one process on one problem size count only together and are committed together, so that a
stopped sweep continues with the next process. After so many processes each problem size is decided, and those that are
still open get more. If the time budget ends before, the last decision stands until the same command continues.
"""

from __future__ import annotations

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

    def __init__(self, store: Store, plan: Plan, sweep_id: int, clock: Callable[[], float], deadline: float) -> None:
        self.store, self.plan, self.sweep_id, self.clock, self.deadline = store, plan, sweep_id, clock, deadline
        self.left_out = 0  # trials, without those of processes that might have been added
        self.is_incomplete = False  # the tensors of a problem size could not be built
        self._uid = store.sweep_uid(sweep_id)
        self._turn_s = 0.0

    def run(self, coarse: Iterable[tuple[ProblemPlan, Mapping[NamedInts, Sequence[float]]]]) -> Iterator[Event]:
        """Confirm problem sizes, each given with its configs' block values in microseconds, the rounds in order."""
        chosen = [self._finalists(size, times_us) for size, times_us in coarse]
        studies = self.store.studies(problems={group.subject.problem for group in chosen})
        pending, decided = list[Finalists](), 0
        for group in chosen:
            stored = [study.finals for study in studies if study.finals and self._is_of(group.subject, study)]
            if self._is_confirmed(group, stored[-1] if stored else {}):
                yield SizeDone(group.subject.problem)
            else:
                pending.append(group)
        for decision, processes in enumerate(self.plan.processes, start=1):
            yield from self._timed(pending, processes, decision)
            timed, pending = pending, []
            for group in timed:
                if not group.failure and self._is_settled(group, processes):
                    yield SizeDone(group.subject.problem)
                elif not group.failure:
                    pending.append(group)
            if self.left_out:
                for group in pending:
                    if decided and group.processes.issuperset(_numbers(decided)):
                        self._end(group)
                return
            decided = processes
        yield from (SizeDone(group.subject.problem) for group in pending)  # all finalists have failed

    def withdraw(self, size: ProblemPlan) -> None:
        """End an older confirmation at other clock or power limits: the coarse pass at these replaces it."""
        is_unknown = self.plan.backend.limits == ClockLimits()
        studies = () if is_unknown else self.store.studies(problems={size.problem})
        if any(self._has_other_limits(study.finals) for study in studies if self._is_of(size, study)):
            run = FinalsRun(self._uid, PLAN.tie_band, PLAN.keep_band, 0.0)
            self.store.end_finals(self.sweep_id, self.plan.subject(size), run)

    def _has_other_limits(self, times: Finals) -> bool:
        limits = self.plan.backend.limits
        return any(limits.difference(self.store.limits_of(sweep)) for sweep in _sweeps(times))

    def _is_of(self, size: ProblemPlan, study: Study) -> bool:
        own = (size.problem, size.version.source_hash, self.plan.device_of(size))
        return (study.problem, study.source_hash, study.device) == own

    def _finalists(self, size: ProblemPlan, times_us: Mapping[NamedInts, Sequence[float]]) -> Finalists:
        subject = self.plan.subject(size)
        tried = self.store.tried(subject, sweep=self.sweep_id, stage="final")
        configs = [
            config
            for config in choose_finalists(times_us, size.version.axes, size.always, PLAN)
            if config not in tried or tried[config].status is Status.OK
        ]
        timed = self.store.finals(subject, self.sweep_id)
        names = [{times.process for times in timed.get(config, [])} for config in configs]
        done = set.intersection(*names) if names else set()
        processes = {number for number in _numbers(self.plan.processes[-1]) if process_name(number) in done}
        arms = list(map(size.arm, configs))
        arms += [replace(arm, duplicate=True) for arm in arms if arm.config == size.default]
        return Group(size, arms, processes)

    def _is_confirmed(self, group: Finalists, times: Finals) -> bool:
        """Return True if there are no finalists, or if all have rows that no time budget cut short."""
        configs = _configs(group)
        if not configs or not set(configs) <= times.keys():
            return not configs
        has_own = self._uid in _sweeps(times)
        if self._has_other_limits(times) or (self.plan.options.again and not has_own):
            return False
        return not (has_own and len(group.processes) < self.plan.processes[-1] and _is_open(group, times))

    def _timed(self, groups: Sequence[Finalists], processes: int, decision: int) -> Iterator[Event]:
        """Time each problem size in processes until so many have timed it."""
        if groups:
            yield ConfirmationStarted(len(groups), processes, self._missing(groups, processes), decision)

        def order(group: Finalists, process: int, round: int) -> list[KernelArm]:
            return self.plan.permuted(group.arms, "final", process - 1, round, seed_text(group.subject.problem))

        def is_over() -> bool:  # a turn cannot be interrupted: the next may take as long as the last
            return self.clock() + self._turn_s > self.deadline

        begun = self.clock()
        is_first_checked = self.plan.is_partial  # the coarse pass looked for races of most configs on other sizes
        numbers, rounds = _numbers(processes), self.plan.rounds
        schedule = Schedule(numbers, rounds, order, is_over=is_over, is_first_checked=is_first_checked)
        for turn in measure(self.plan.backend, groups, schedule):
            self._turn_s, begun = (ended := self.clock()) - begun, ended
            yield from self._stored(turn)
        self.left_out = self._missing(groups, processes)

    def _missing(self, groups: Sequence[Finalists], processes: int) -> int:
        blocks = ((group, sum(map(group.wants, _numbers(processes)))) for group in groups)
        return sum(count * self.plan.rounds * len(group.arms) for group, count in blocks)

    def _stored(self, turn: Turn[KernelArm, ProblemPlan]) -> Iterator[Event]:
        size = turn.group.subject
        if turn.group.failure:
            self.is_incomplete = True
            yield ConfirmationSkipped(size.problem, turn.group.failure)
            return
        rows, name = [], process_name(turn.process)
        for block in (*turn.failed, *turn.blocks):
            stage = "duplicate" if block.arm.duplicate and block.outcome.status is Status.OK else "final"
            rows.append(self.plan.row(size, block.arm.config, block.outcome, block.place, name, stage))
        self.store.add_many(self.sweep_id, rows)
        yield from (TrialDone(row, from_database=False) for row in rows)

    def _is_settled(self, group: Finalists, processes: int) -> bool:
        """Decide a problem size that so many processes timed. True, and noted in the database, if they are enough."""
        if not group.processes.issuperset(_numbers(processes)):
            return False
        run, names = self._run_of(group), set(map(process_name, _numbers(processes)))
        timed = self.store.finals(self.plan.subject(group.subject), self.sweep_id)
        times = {
            config: [t.of_run(run) for t in timed.get(config, []) if t.stage == "final" and t.process in names]
            for config in _configs(group)
        }
        if any(times.values()) and processes < self.plan.processes[-1] and _is_open(group, times):
            return False
        self._end(group)
        return True

    def _run_of(self, group: Finalists) -> FinalsRun:
        tick_us = self.store.tick_us(self.plan.subject(group.subject), self.sweep_id)
        return FinalsRun(self._uid, PLAN.tie_band, PLAN.keep_band, floor_us(tick_us))

    def _end(self, group: Finalists) -> None:
        subject = self.plan.subject(group.subject)
        self.store.end_finals(self.sweep_id, subject, self._run_of(group))
        if self.plan.is_partial:
            self.store.mark_complete(self.sweep_id, subject, len(group.subject.configs))


def _is_open(group: Finalists, times: Finals) -> bool:
    size = group.subject
    return decide_finals(times, current=size.current, default=size.default, axes=size.version.axes).needs_more


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
