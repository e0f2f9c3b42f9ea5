"""The queries behind :class:`fp8tune.store.results.Store` that read finals: which sessions count, and what they timed.

Finals count once they may stand (:meth:`fp8tune.store.results.Store.end_finals`). Of the finals of one problem, kernel
version and device, those of the sweep that started last count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Select, func, inspect, select

from fp8tune.records import Device, FinalsRun, KernelVersion, NamedInts, Problem, ProcessTimes
from fp8tune.store.columns import LARGEST_NUMBER
from fp8tune.store.reading import device_ids, problem_ids
from fp8tune.store.schema import Candidates, Configs, Finals, KernelVersions, Sweeps, Trials, Workers
from fp8tune.store.summaries import Block, summaries
from fp8tune.store.unreadable import ById, MissingRowError, readable

Subject = tuple[int, int, int]
"""The ids of a problem, a kernel version and a device."""


@dataclass(frozen=True)
class Sessions:
    """The finals that count: by subject, the sweep's id -> its session."""

    by_subject: Mapping[Subject, Mapping[int, FinalsRun]]

    @classmethod
    def load(cls, connection: Connection, of: Subject | None = None) -> Sessions:
        """Read all of them, or one subject's. They are few: one a problem and sweep."""
        if not inspect(connection).has_table(Finals.name):
            return cls({})
        query = select(*Finals.c, Sweeps.c.uid, Sweeps.c.started_at).join(Sweeps, Sweeps.c.id == Finals.c.sweep_id)
        if of is not None:
            columns = (Finals.c.problem_id, Finals.c.version_id, Finals.c.device_id)
            query = query.where(*(column == id for column, id in zip(columns, of, strict=True)))
        rows = readable(connection, query.order_by(Sweeps.c.started_at, Sweeps.c.uid))
        last = {(row.problem_id, row.version_id, row.device_id): row for row in rows}
        return cls({of: {row.sweep_id: _run(row)} for of, row in last.items()})

    def of(self, *subject: int) -> Mapping[int, FinalsRun]:
        """Those of a problem, kernel version and device, by the sweep's id."""
        return self.by_subject.get((subject[0], subject[1], subject[2]), {})


def _run(row: Any) -> FinalsRun:
    return FinalsRun(row.uid, row.tie_band, row.keep_band, row.floor_us)


@dataclass(frozen=True)
class Timed:
    """What one process timed of one candidate in one sweep's finals."""

    stage: str
    process: str
    blocks: tuple[Block, ...]

    def visit(self, session: FinalsRun) -> ProcessTimes:
        """As a part of its session."""
        return ProcessTimes(session, self.process, self.blocks)


def of_candidate(
    finals: Mapping[tuple[str, int, int], tuple[Block, ...]],
    sessions: Mapping[int, FinalsRun],
    processes: Mapping[int, str],
) -> dict[str, tuple[ProcessTimes, ...]]:
    """Stage -> the visits of one candidate in the sessions that count, by the sweep's uid and the process.

    ``finals`` as in :class:`fp8tune.store.summaries.Summary`; ``sessions`` and ``processes`` by the ids of sweeps and
    workers.
    """
    found: dict[str, list[ProcessTimes]] = {}
    for (stage, sweep, worker), blocks in finals.items():
        if sweep in sessions:
            with contextlib.suppress(MissingRowError):
                found.setdefault(stage, []).append(ProcessTimes(sessions[sweep], processes[worker], blocks))
    order = attrgetter("session.sweep", "process")
    return {stage: tuple(sorted(visits, key=order)) for stage, visits in found.items()}


def processes(connection: Connection) -> Mapping[int, str]:
    """The names of all workers by id. Few beside the trials."""
    found = readable(connection, select(Workers.c.id, Workers.c.process))
    return ById(connection, Workers, ((row.id, row.process) for row in found))


def of_sweep(
    connection: Connection, version: KernelVersion, device: Device, problem: Problem, sweep: int
) -> dict[NamedInts, list[Timed]]:
    """Config -> what one sweep's finals of a problem timed so far, ended or not."""
    mine = _candidates(version, device, problem)
    configs = {row.id: row.items or NamedInts() for row in readable(connection, mine.add_columns(Configs.c["items"]))}
    names = processes(connection)
    found: dict[NamedInts, list[Timed]] = {}
    for candidate, summary in summaries(connection, mine):
        for (stage, of, worker), blocks in sorted(summary.finals.items()):
            if of == sweep and candidate in configs:
                with contextlib.suppress(MissingRowError):
                    found.setdefault(configs[candidate], []).append(Timed(stage, names[worker], blocks))
    return found


def tick_us(
    connection: Connection, version: KernelVersion, device: Device, problem: Problem, sweep: int
) -> float | None:
    """The smallest step between two samples of a block in one sweep's finals of a problem."""
    mine = _candidates(version, device, problem)
    query = select(func.min(Trials.c.tick_us)).where(Trials.c.candidate_id.in_(mine), Trials.c.sweep_id == sweep)
    query = query.where(Trials.c.tick_us.between(0, LARGEST_NUMBER))  # SQLite: no text is
    found: float | None = connection.execute(query.where(Trials.c.stage != "screen")).scalar()
    return found


def _candidates(version: KernelVersion, device: Device, problem: Problem) -> Select[Any]:
    """The ids of all candidates of one problem, kernel version and device."""
    return (
        select(Candidates.c.id)
        .join(Configs, Configs.c.id == Candidates.c.config_id)
        .join(KernelVersions, KernelVersions.c.id == Candidates.c.version_id)
        .where(KernelVersions.c.kernel == version.kernel, KernelVersions.c.source_hash == version.source_hash)
        .where(Candidates.c.device_id.in_(device_ids(device)), Candidates.c.problem_id.in_(problem_ids(problem)))
    )
