"""The finals of a sweep: each problem's finalists again, on fresh data from fresh processes.

All problems share the processes (:mod:`fp8tune.measure.engine`). The declared default runs under two names, which
shows the noise. The rows of one process on one problem count only together and are committed together, so that a killed
sweep continues with the next process. After so many processes each problem is decided, and those that are still
ambiguous get more. If the time budget ends before that, the judgement stands until the same command goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fp8tune.measure.arms import KernelArm
from fp8tune.measure.engine import Group, Schedule, TimedBlock, Turn, measure
from fp8tune.plan.problems import seed_text
from fp8tune.records import Evidence, FinalsRun, NamedInts, Outcome, Problem, ProcessTimes, Row, Status
from fp8tune.stats.calibration import calibration_of, floor_us, is_calibrated, plan_for
from fp8tune.stats.decide import MeasuringPlan, decide_finals, processes_to_settle
from fp8tune.stats.pairs import Finals as Times
from fp8tune.stats.screen import choose_finalists
from fp8tune.stats.study import Decision
from fp8tune.store.results import Store
from fp8tune.sweep.events import Added, Event, FinalsAhead, FinalsStarted, NoFinals, TrialDone
from fp8tune.sweep.planning import Plan, ProblemPlan

ProblemFinals = Group[KernelArm, ProblemPlan]
"""One problem's finals in this sweep: its finalists, less those that failed in the finals, and the default twice."""


FORETOLD_AFTER = 3
"""Processes after which a problem shows when it will be settled; fewer have no spread to speak of."""


@dataclass
class Finals:
    """All finals of one sweep."""

    store: Store
    plan: Plan
    sweep_id: int
    clock: Callable[[], float]
    deadline: float = math.inf
    """When the time budget ends, on the clock."""
    left_out: int = 0
    """Trials that the time budget left out; those of processes that would have been added are not known."""
    is_skipped: bool = False
    """Whether a problem's tensors could not be built, so that the same command has to try again."""

    def __post_init__(self) -> None:
        self._turn_s = 0.0
        device = self.plan.backend.device
        known = self.store.calibrations(device) if self.are_wanted else {}
        self._measured, _ = calibration_of(device, known)
        self._numbers = plan_for(self._measured)

    @cached_property
    def _uid(self) -> str:
        return self.store.sweep_uid(self.sweep_id)

    def is_over(self) -> bool:
        """Whether the time budget is spent."""
        return self.clock() > self.deadline

    def _has_no_turn_left(self) -> bool:
        """Whether another turn as long as the last would not end in time: it cannot be broken off."""
        return self.clock() + self._turn_s > self.deadline

    def run(self, screened: Iterable[tuple[ProblemPlan, Mapping[NamedInts, Sequence[float]]]]) -> Iterator[Event]:
        """``screened``: each problem with its configs' block values in microseconds, the rounds in order."""
        chosen = [self._chosen(of, times_us) for of, times_us in screened if times_us]
        answers = self._answers([group.subject.problem for group in chosen])
        pending: list[ProblemFinals] = []
        for group in chosen:
            stored = answers.get((group.subject.problem, group.subject.version.source_hash), [])
            if self._is_answered(group, stored):
                rows = list(rows_of(stored))
                yield Added(len(rows))
                yield from (TrialDone(row, from_database=True) for row in rows)
            else:
                pending.append(group)
        decided = 0
        for processes in self.judged_after:
            yield from self._timed(pending, processes)
            pending = [group for group in pending if not group.failure and not self._is_settled(group, processes)]
            if self.left_out:
                for group in pending:
                    if decided and set(_numbers(decided)) <= group.processes:
                        self._end(group, self._finals_run(group))
                return
            decided = processes

    def ahead(self, of: ProblemPlan, times_us: Mapping[NamedInts, Sequence[float]]) -> FinalsAhead:
        """What the finals of a problem will take that is screened; takes what :meth:`run` does."""
        problem = of.problem
        if not times_us:
            return FinalsAhead(problem, 0, 0)
        group = self._chosen(of, times_us)
        stored = self._answers([problem]).get((problem, of.version.source_hash), [])
        return FinalsAhead(problem, 0 if self._is_answered(group, stored) else len(group.arms), len(group.processes))

    @property
    def judged_after(self) -> tuple[int, ...]:
        """Processes after which a problem is judged."""
        return (self._numbers.processes, *self._numbers.more_processes)

    @property
    def are_wanted(self) -> bool:
        """Whether the sweep has finals."""
        return not self.plan.options.quick and self.plan.backend.times

    @property
    def numbers(self) -> MeasuringPlan:
        """How much is measured on this device."""
        return self._numbers

    # Who is timed

    def _chosen(self, of: ProblemPlan, times_us: Mapping[NamedInts, Sequence[float]]) -> ProblemFinals:
        failed = [] if self.plan.options.retry_failed else self._failed(of)
        configs = [c for c in choose_finalists(times_us, of.version.axes, of.always, self._numbers) if c not in failed]
        arms = [of.arm(config) for config in configs]
        arms += [replace(arm, duplicate=True) for arm in arms if arm.config == of.version.default]
        timed = self.store.finals(self.plan.subject(of), self.sweep_id)
        names = [{one.process for one in timed.get(config, [])} for config in configs]
        done = set.intersection(*names) if names else set()
        numbers = (number for number in _numbers(self._last) if process_name(number) in done)
        return Group(of, arms, set(numbers))

    def _failed(self, of: ProblemPlan) -> list[NamedInts]:
        tried = self.store.tried(self.plan.subject(of), sweep=self.sweep_id, stage="final")
        return [config for config, outcome in tried.items() if outcome.status is not Status.OK]

    def _answers(self, problems: Sequence[Problem]) -> dict[tuple[Problem, str], list[Evidence]]:
        """Finals that count already, by problem and kernel source."""
        found: dict[tuple[Problem, str], list[Evidence]] = {}
        for entry in self.store.evidence(problems=set(problems), device=self.plan.backend.device):
            if entry.finals and entry.version is not None and entry.status is Status.OK:
                found.setdefault((entry.problem, entry.version.source_hash), []).append(entry)
        return found

    def _is_answered(self, group: ProblemFinals, stored: Sequence[Evidence]) -> bool:
        """True if there are no finalists, or if every finalist has finals that no time budget cut short."""
        times = {entry.config: entry.finals for entry in stored if entry.config is not None}
        configs = _configs(group)
        if not configs or not set(configs) <= set(times):
            return not configs
        has_own = any(one.run.sweep == self._uid for entry in stored for one in entry.finals)
        if self.plan.options.again and not has_own:
            return False
        was_cut_short = has_own and len(group.processes) < self._last and self._decided(group, times).needs_more
        return not was_cut_short

    # Timing

    def _timed(self, groups: Sequence[ProblemFinals], processes: int) -> Iterator[Event]:
        """Have each problem timed by so many processes."""
        if groups:
            missing = sum(self._trials(group, processes) for group in groups)
            judgement = self.judged_after.index(processes) + 1
            yield FinalsStarted(
                len(groups),
                processes,
                missing,
                self._numbers,
                is_calibrated(self._measured),
                judgement,
                len(self.judged_after),
            )
        numbers = _numbers(processes)
        schedule = Schedule(numbers, self._numbers.rounds, self._order, is_over=self._has_no_turn_left)
        begun = self.clock()
        for turn in measure(self.plan.backend, groups, schedule):
            begun, self._turn_s = (ended := self.clock()), ended - begun
            yield from self._stored(turn)
            if len(turn.group.processes) in (FORETOLD_AFTER, *self.judged_after):
                yield self._foretold(turn.group)
        if any(group.wants(number) for group in groups for number in numbers):
            self.left_out = sum(self._trials(group, processes) for group in groups)

    def _order(self, group: ProblemFinals, process: int, round: int) -> list[KernelArm]:
        return self.plan.permuted(group.arms, "final", process - 1, round, seed_text(group.subject.problem))

    def _stored(self, turn: Turn[KernelArm, ProblemPlan]) -> Iterator[Event]:
        if turn.group.failure:
            self.is_skipped = True
            yield NoFinals(turn.group.subject.problem, turn.group.failure)
            return
        rows = [self._row(turn, block) for block in (*turn.failed, *turn.blocks)]
        self.store.add_many(self.sweep_id, rows)
        yield from (TrialDone(row, from_database=False) for row in rows)

    def _row(self, turn: Turn[KernelArm, ProblemPlan], block: TimedBlock[KernelArm]) -> Row:
        stage = "duplicate" if block.arm.duplicate and block.outcome.status is Status.OK else "final"
        name = process_name(turn.process)
        return self.plan.row(turn.group.subject, block.arm.config, block.outcome, block.place, name, stage)

    def _trials(self, group: ProblemFinals, processes: int) -> int:
        missing = sum(group.wants(number) for number in _numbers(processes))
        return missing * self._numbers.rounds * len(group.arms)

    # Judging

    def _is_settled(self, group: ProblemFinals, processes: int) -> bool:
        """Judge a problem that so many processes timed; True, and noted in the database, if they are enough."""
        counted = set(_numbers(processes))
        if not counted <= group.processes:
            return False
        of, run, names = group.subject, self._finals_run(group), {process_name(number) for number in counted}
        timed = self.store.finals(self.plan.subject(of), self.sweep_id)
        times = {
            config: [t.of_run(run) for t in timed.get(config, []) if t.stage == "final" and t.process in names]
            for config in _configs(group)
        }
        if any(times.values()) and processes < self._last and self._decided(group, times).needs_more:
            return False
        self._end(group, run)
        return True

    def _foretold(self, group: ProblemFinals) -> FinalsAhead:
        """When the problem will be settled, as far as its processes show."""
        of, run, done = group.subject, self._finals_run(group), len(group.processes)
        timed = self.store.finals(self.plan.subject(of), self.sweep_id)
        times = {c: [t.of_run(run) for t in timed.get(c, []) if t.stage == "final"] for c in _configs(group)}
        likely = None
        if all(times.values()):
            likely = processes_to_settle(
                times,
                [number for number in self.judged_after if number >= done],
                current=of.current,
                default=of.version.default,
                axes=of.version.axes,
            )
        return FinalsAhead(of.problem, 0 if group.failure else len(group.arms), done, likely)

    def _decided(self, group: ProblemFinals, times: Times) -> Decision:
        version = group.subject.version
        return decide_finals(times, current=group.subject.current, default=version.default, axes=version.axes)

    def _finals_run(self, group: ProblemFinals) -> FinalsRun:
        tick_us = self.store.tick_us(self.plan.subject(group.subject), self.sweep_id)
        floor = floor_us(self._measured, tick_us)
        return FinalsRun(self._uid, self._numbers.tie_band, self._numbers.keep_band, floor)

    def _end(self, group: ProblemFinals, run: FinalsRun) -> None:
        self.store.end_finals(self.sweep_id, self.plan.subject(group.subject), run)

    @property
    def _last(self) -> int:
        return max(self._numbers.processes, *self._numbers.more_processes)


def _configs(group: ProblemFinals) -> list[NamedInts]:
    return [arm.config for arm in group.arms if not arm.duplicate]


def _numbers(processes: int) -> range:
    """The first so many processes of the finals; number 0 is the screen's."""
    return range(1, processes + 1)


def process_name(number: int) -> str:
    """The name of a process of the finals, from 1: the same when the sweep is continued, unique in its sweep."""
    return f"final {number - 1:02d}"


def rows_of(stored: Iterable[Evidence]) -> Iterator[Row]:
    """The rows of finals that count, each config's by sweep, process and round; samples are left in the database."""
    for entry in stored:
        for stage, of_stage in (("final", entry.finals), ("duplicate", entry.duplicate)):
            for times in of_stage:
                yield from (_row_of(entry, stage, times, round, time_us) for round, time_us in times.blocks)


def _row_of(entry: Evidence, stage: str, times: ProcessTimes, round: int, time_us: float) -> Row:
    outcome, name = Outcome(Status.OK, time_us), times.process
    identity = (entry.problem, entry.config, entry.device, entry.kind)
    return Row(*identity, outcome, entry.version, stage=stage, round=round, process=name)
