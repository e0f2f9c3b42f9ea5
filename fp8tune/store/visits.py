"""The queries behind :class:`fp8tune.store.results.Store` that read finals: which sessions count, and what they timed.

Finals count once they may stand (:meth:`fp8tune.store.results.Store.end_finals`), and until a later sweep's replace
them. Two that were made apart and brought together by an import do not replace each other: both count. A sweep also
notes the finals that were there on other devices of its device's name: to disagree with those is no dispute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Select, func, inspect, select

from fp8tune.records import Device, FinalsRun, KernelVersion, NamedInts, Problem, ProcessTimes
from fp8tune.store.columns import LARGEST_NUMBER
from fp8tune.store.reading import device_ids, problem_ids
from fp8tune.store.schema import Candidates, Configs, Devices, Finals, KernelVersions, Sweeps, Trials, Workers
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
        query = select(*Finals.c, Sweeps.c.uid).join(Sweeps, Sweeps.c.id == Finals.c.sweep_id)
        if of is not None:
            columns = (Finals.c.problem_id, Finals.c.version_id, Finals.c.device_id)
            query = query.where(*(column == id for column, id in zip(columns, of, strict=True)))
        by_subject: dict[Subject, list[Any]] = {}
        for row in readable(connection, query.order_by(Sweeps.c.uid)):
            by_subject.setdefault((row.problem_id, row.version_id, row.device_id), []).append(row)
        return cls({subject: _unreplaced(rows) for subject, rows in by_subject.items()})

    def of(self, *subject: int) -> Mapping[int, FinalsRun]:
        """Those of a problem, kernel version and device, by the sweep's id."""
        return self.by_subject.get((subject[0], subject[1], subject[2]), {})


def _unreplaced(rows: Iterable[Any]) -> dict[int, FinalsRun]:
    rows = list(rows)
    replaced = {uid for row in rows for uid in row.replaces.split()}
    return {
        row.sweep_id: FinalsRun(
            row.uid, row.tie_band, row.keep_band, row.floor_us, replaces=frozenset(row.replaces.split())
        )
        for row in rows
        if row.uid not in replaced
    }


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


def known(connection: Connection, problem: int, version: int, device: Device) -> dict[int, FinalsRun]:
    """The finals that count of a problem and kernel version, on any device of this one's name: by the sweep's id."""
    found: dict[int, FinalsRun] = {}
    for id in connection.execute(_of_the_name(device)).scalars():
        found |= Sessions.load(connection, (problem, version, id)).of(problem, version, id)
    return found


def has_rivals(connection: Connection, device: Device | None) -> bool:
    """Whether more finals than one count for some problem (on devices of a name), none known to the others."""
    mine = None if device is None else set(connection.execute(_of_the_name(device)).scalars())
    names = {row.id: (row.arch, row.name) for row in readable(connection, select(*Devices.c))}
    groups: dict[tuple[int, int, tuple[str, str]], list[FinalsRun]] = {}
    for (problem, version, of), sessions in Sessions.load(connection).by_subject.items():
        if of in names and (mine is None or of in mine):
            groups.setdefault((problem, version, names[of]), []).extend(sessions.values())
    return any(_are_rivals(sessions) for sessions in groups.values())


def _are_rivals(sessions: Sequence[FinalsRun]) -> bool:
    replaced = frozenset().union(*(session.replaces for session in sessions))
    return sum(session.sweep not in replaced for session in sessions) > 1


def _of_the_name(device: Device) -> Select[Any]:
    return select(Devices.c.id).where(Devices.c.arch == device.arch, Devices.c.name == device.name)
