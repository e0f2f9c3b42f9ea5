"""The finals of a sweep: each problem's finalists again, on fresh data from fresh processes.

The processes are shared by all problems of the sweep: each goes through them once, times the finalists of each in
permuted rounds, and makes room for the next, so that one process at a time is on the GPU. The declared default runs
under two names. A *visit* is one process at one problem; its rows count only together and are committed together, so
that a killed sweep continues with the next visit. After so many processes each problem is judged, and those still
ambiguous get more; where a time budget leaves those out, the judgement stands until the same command goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8tune.choose.calibration import floor_us, is_calibrated, measuring_plan_of
from fp8tune.choose.decision import Decision, needs_more
from fp8tune.choose.finals import FinalsTimes, decide_finals
from fp8tune.choose.screening import finalists
from fp8tune.measure.clock import Slot
from fp8tune.measure.laboratory import Batch, OpenLaboratory
from fp8tune.records import Evidence, FinalsRun, NamedInts, Outcome, Problem, ProcessTimes, Row, Status
from fp8tune.store.process_times import Timed
from fp8tune.store.results import Store
from fp8tune.sweep.events import Added, Event, FinalsStarted, NoFinals, Request, TrialDone

Entry = tuple[NamedInts, str]
"""A config and the stage of its rows: ``final``, or ``duplicate`` for the default under its second name."""


@dataclass
class Match:
    """One problem's finals in this sweep."""

    batch: Batch
    configs: tuple[NamedInts, ...]
    """Its finalists, less those that failed in the finals."""
    visited: set[str] = field(default_factory=set)
    """The processes that have timed all of them."""
    is_over: bool = False

    @property
    def entries(self) -> list[Entry]:
        """What each round times."""
        default = self.batch.version.default
        duplicate = [(default, "duplicate")] if default in self.configs else []
        return [*((config, "final") for config in self.configs), *duplicate]

    def drop(self, config: NamedInts) -> None:
        """Go on without a finalist."""
        self.configs = tuple(kept for kept in self.configs if kept != config)


@dataclass
class Finals:
    """All finals of one sweep."""

    store: Store
    request: Request
    sweep_id: int
    lab: OpenLaboratory
    deadline: float = math.inf
    """On the monotonic clock: no visit begins after it."""
    left_out: int = 0
    """Trials that the deadline left out; those of processes that would have been added are not known."""
    skipped: bool = False
    """Whether some problem could not be visited, so that the same command has to try again."""

    def __post_init__(self) -> None:
        self._measured = self.store.calibration(self.request.laboratory.device)
        self._protocol = measuring_plan_of(self._measured)

    def run(self, screened: Iterable[tuple[Batch, Mapping[NamedInts, Sequence[float]]]]) -> Iterator[Event]:
        """``screened``: each problem with its configs' block values in microseconds, the rounds in order."""
        chosen = [self._match(batch, times_us) for batch, times_us in screened if times_us]
        answers = self._answers([match.batch.problem for match in chosen])
        pending: list[Match] = []
        for match in chosen:
            stored = answers.get((match.batch.problem, match.batch.version.source_hash), [])
            if self._is_answered(match, stored):
                rows = list(rows_of(stored))
                yield Added(len(rows))
                yield from (TrialDone(row, from_database=True) for row in rows)
            else:
                pending.append(match)
        judged = 0
        for processes in (self._protocol.processes, *self._protocol.more_processes):
            yield from self._processes(pending, processes)
            pending = [match for match in pending if not match.is_over and not self._is_settled(match, processes)]
            if self.left_out:
                for match in pending:
                    if judged and _names(judged) <= match.visited:
                        self._end(match, self._session(match))
                return
            judged = processes

    # Who plays

    def _match(self, batch: Batch, times_us: Mapping[NamedInts, Sequence[float]]) -> Match:
        incumbent = self.request.incumbents.get(batch.problem)
        always = [config for config in (batch.version.default, incumbent) if config is not None]
        match = Match(batch, finalists(times_us, batch.version.axes, always, self._protocol))
        if not self.request.retry_failed:
            for config in self._failed(batch):
                match.drop(config)
        timed = self.store.finals(self.request.subject(batch), self.sweep_id)
        visits = [{one.process for one in timed.get(config, [])} for config in match.configs]
        match.visited = set.intersection(*visits) if visits else set()
        return match

    def _failed(self, batch: Batch) -> list[NamedInts]:
        tried = self.store.tried(self.request.subject(batch), sweep=self.sweep_id, stage="final")
        return [config for config, outcome in tried.items() if outcome.status is not Status.OK]

    def _answers(self, problems: Sequence[Problem]) -> dict[tuple[Problem, str], list[Evidence]]:
        """Finals that count already, by problem and kernel source."""
        found: dict[tuple[Problem, str], list[Evidence]] = {}
        for entry in self.store.evidence(problems=set(problems), device=self.request.laboratory.device):
            if entry.finals and entry.version is not None and entry.status is Status.OK:
                found.setdefault((entry.problem, entry.version.source_hash), []).append(entry)
        return found

    def _is_answered(self, match: Match, stored: Sequence[Evidence]) -> bool:
        """True if there are no finalists, or if all have finals that no time budget of this sweep cut short."""
        visits = {entry.config: entry.finals for entry in stored if entry.config is not None}
        if not match.configs or not set(match.configs) <= set(visits):
            return not match.configs
        has_own = any(visit.session.sweep == self._uid for entry in stored for visit in entry.finals)
        if self.request.again and not has_own:
            return False
        was_cut_short = has_own and len(match.visited) < self._last and needs_more(self._decided(match, visits))
        return not was_cut_short

    @property
    def _uid(self) -> str:
        return self.store.sweep_uid(self.sweep_id)

    # Timing

    def _processes(self, matches: Sequence[Match], processes: int) -> Iterator[Event]:
        """Bring each problem to so many visits."""
        if matches:
            missing = sum(self._trials(match, processes) for match in matches)
            yield FinalsStarted(len(matches), processes, missing, self._protocol, is_calibrated(self._measured))
        for index in range(processes):
            waiting = [match for match in matches if process_name(index) not in match.visited]
            if waiting:
                self.lab.fresh_runner()
            for match in waiting:
                if time.monotonic() > self.deadline:
                    self.left_out = sum(self._trials(late, processes) for late in matches)
                    return
                yield from self._visit(match, index)

    def _trials(self, match: Match, processes: int) -> int:
        missing = sum(process_name(index) not in match.visited for index in range(processes))
        return 0 if match.is_over else missing * self._protocol.rounds * len(match.entries)

    def _visit(self, match: Match, index: int) -> Iterator[Event]:
        """One process at one problem. A config that fails costs its own row, and the visit begins again without it."""
        while match.configs and not match.is_over:
            if reason := self.lab.prepare_final(match.batch):
                match.is_over = self.skipped = True
                self.lab.fresh_runner()
                yield NoFinals(match.batch.problem, reason)
                return
            rows = list(self._rounds(match, index))
            if rows[-1].outcome.status is Status.OK:
                match.visited.add(process_name(index))
                self.store.add_many(self.sweep_id, rows)
                yield from (TrialDone(row, from_database=False) for row in rows)
                return
            failed = rows[-1]
            self.store.add(self.sweep_id, failed)
            yield TrialDone(failed, from_database=False)
            match.drop(failed.config or NamedInts())
            self.lab.fresh_runner()

    def _rounds(self, match: Match, index: int) -> Iterator[Row]:
        """The rows of one visit; the last is the first that failed, if one did."""
        batch = match.batch
        for round in range(self._protocol.rounds):
            after = ""
            entries = self.request.permuted(match.entries, "final", index, round, batch.problem)
            for position, (config, stage) in enumerate(entries):
                slot = Slot(index + 1, round, position, after, stage == "duplicate")
                outcome = self.lab.run_final(batch, config, slot)
                yield self._row(batch, config, outcome, stage, index, slot)
                if outcome.status is not Status.OK:
                    return
                after = f"{batch.problem} {config.canonical}"

    def _row(self, batch: Batch, config: NamedInts, outcome: Outcome, stage: str, index: int, slot: Slot) -> Row:
        kept = stage if outcome.status is Status.OK else "final"
        return self.request.row(
            batch, config, outcome, stage=kept, round=slot.round, process=process_name(index), position=slot.position
        )

    # Judging

    def _is_settled(self, match: Match, processes: int) -> bool:
        """Judge a problem that so many processes visited; True, and noted in the database, where they are enough."""
        counted = _names(processes)
        if not counted <= match.visited:
            return False
        batch, session = match.batch, self._session(match)
        timed = self.store.finals(self.request.subject(batch), self.sweep_id)
        visits = {config: _visits(timed.get(config, []), session, counted) for config in match.configs}
        if any(visits.values()) and processes < self._last and needs_more(self._decided(match, visits)):
            return False
        self._end(match, session)
        return True

    def _decided(self, match: Match, visits: FinalsTimes) -> Decision:
        version = match.batch.version
        incumbent = self.request.incumbents.get(match.batch.problem)
        return decide_finals(visits, incumbent=incumbent, default=version.default, axes=version.axes)

    def _session(self, match: Match) -> FinalsRun:
        tick_us = self.store.tick_us(self.request.subject(match.batch), self.sweep_id)
        floor = floor_us(self._measured, tick_us)
        return FinalsRun(self._uid, self._protocol.tie_band, self._protocol.keep_band, floor)

    def _end(self, match: Match, session: FinalsRun) -> None:
        self.store.end_finals(self.sweep_id, self.request.subject(match.batch), session)

    @property
    def _last(self) -> int:
        return max(self._protocol.processes, *self._protocol.more_processes)


def _visits(timed: Iterable[Timed], session: FinalsRun, counted: set[str]) -> list[ProcessTimes]:
    return [one.of_run(session) for one in timed if one.stage == "final" and one.process in counted]


def process_name(index: int) -> str:
    """The name of a process of the finals: the same when the sweep is continued, unique in its sweep."""
    return f"final {index:02d}"


def _names(processes: int) -> set[str]:
    return {process_name(index) for index in range(processes)}


def rows_of(stored: Iterable[Evidence]) -> Iterator[Row]:
    """The rows of finals that count, each config's by session, process and round; samples are left in the database."""
    for entry in stored:
        for stage, visits in (("final", entry.finals), ("duplicate", entry.duplicate)):
            for visit in visits:
                for round, time_us in visit.blocks:
                    yield Row(
                        problem=entry.problem,
                        config=entry.config,
                        device=entry.device,
                        kind=entry.kind,
                        outcome=Outcome(Status.OK, time_us),
                        version=entry.version,
                        stage=stage,
                        round=round,
                        process=visit.process,
                    )
