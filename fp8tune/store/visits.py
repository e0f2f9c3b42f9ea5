"""The queries behind :class:`fp8tune.store.results.Store` that read finals: which sessions count, and what they timed.

Finals count once they ran to their end, and until a later sweep's replace them. Two that were made apart and brought
together by an import do not replace each other: both count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Connection, Integer, Select, String, cast, func, inspect, select, type_coerce

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, KernelVersion, NamedInts, Problem, Session, Status, Visit
from fp8tune.store.reading import device_ids, problem_ids
from fp8tune.store.schema import Candidates, Configs, Finals, KernelVersions, Sweeps, Trials, Workers

Subject = tuple[int, int, int]
"""The ids of a problem, a kernel version and a device."""


@dataclass(frozen=True)
class Sessions:
    """The finals that count: by subject, the sweep's id -> its session."""

    by_subject: Mapping[Subject, Mapping[int, Session]]

    @classmethod
    def load(cls, connection: Connection) -> Sessions:
        """Read all of them; they are few, one a problem and sweep."""
        if not inspect(connection).has_table(Finals.__tablename__):
            return cls({})
        query = select(*Finals.__table__.c, Sweeps.uid).join(Sweeps, Sweeps.id == Finals.sweep_id)
        by_subject: dict[Subject, list[Any]] = {}
        for row in connection.execute(query.order_by(Sweeps.uid)):
            by_subject.setdefault((row.problem_id, row.version_id, row.device_id), []).append(row)
        return cls({subject: _unreplaced(rows) for subject, rows in by_subject.items()})

    def of(self, *subject: int) -> Mapping[int, Session]:
        """Those of a problem, kernel version and device, by the sweep's id."""
        return self.by_subject.get((subject[0], subject[1], subject[2]), {})

    @property
    def sweeps(self) -> set[int]:
        """The ids of all sweeps that hold one."""
        return {sweep for sessions in self.by_subject.values() for sweep in sessions}


def _unreplaced(rows: Iterable[Any]) -> dict[int, Session]:
    rows = list(rows)
    replaced = {uid for row in rows for uid in row.replaces.split()}
    return {
        row.sweep_id: Session(row.uid, row.tie_band, row.keep_band, row.floor_us)
        for row in rows
        if row.uid not in replaced
    }


@dataclass(frozen=True)
class Timed:
    """What one process timed of one candidate in one sweep's finals."""

    candidate: int
    sweep: int
    stage: str
    process: str
    blocks: tuple[tuple[int, float], ...]

    def visit(self, session: Session) -> Visit:
        """As a part of its session."""
        return Visit(session, self.process, self.blocks)


def timed(connection: Connection, candidates: Select[Any] | None, sweeps: Collection[int]) -> list[Timed]:
    """The finals of candidates (None: of all) in these sweeps. Reads one covering index and the few workers."""
    if not sweeps:
        return []
    picoseconds = cast(func.round(Trials.time_us * 1e6), BigInteger)
    block = cast(Trials.round, String) + ":" + cast(picoseconds, String)
    groups = [type_coerce(id, Integer) for id in (Trials.candidate_id, Trials.sweep_id, Trials.worker_id)]
    query = (
        select(*groups, Trials.stage, func.aggregate_strings(block, " "))
        .add_columns(func.min(Trials.time_us), func.max(Trials.time_us))
        .where(Trials.stage != "screen", Trials.status == str(Status.OK), Trials.time_us.is_not(None))
        .where(Trials.sweep_id.in_(sweeps))
        .group_by(Trials.candidate_id, Trials.stage, Trials.worker_id, Trials.sweep_id)
    )
    if candidates is not None:
        query = query.where(Trials.candidate_id.in_(candidates))
    processes = {row.id: row.process for row in connection.execute(select(Workers.id, Workers.process))}
    return [
        Timed(candidate, sweep, stage, processes[worker], _blocks(joined, least, most))
        for candidate, sweep, worker, stage, joined, least, most in connection.execute(query).all()
    ]


def _blocks(joined: str, least: Any, most: Any) -> tuple[tuple[int, float], ...]:
    """``round:picoseconds`` pairs -> (round, microseconds) in order. Refuses what is no time."""
    if not (isinstance(least, float) and isinstance(most, float) and 0 < least <= most < math.inf):
        raise DatabaseError(f"refused {joined[:80]!r}: a time is a positive number of microseconds")
    pairs = (pair.split(":") for pair in joined.split(" "))
    return tuple(sorted((int(round), int(picoseconds) / 1e6) for round, picoseconds in pairs))


def by_candidate(
    connection: Connection, candidates: Select[Any] | None, rows: Mapping[int, Any]
) -> dict[int, dict[str, list[Visit]]]:
    """Candidate -> stage -> its visits in the sessions that count, sessions by uid; ``rows``: the candidates by id."""
    sessions = Sessions.load(connection)
    found: dict[int, dict[str, list[Visit]]] = {}
    for one in timed(connection, candidates, sessions.sweeps):
        row = rows.get(one.candidate)
        session = row and sessions.of(row.problem_id, row.version_id, row.device_id).get(one.sweep)
        if session is not None:
            found.setdefault(one.candidate, {}).setdefault(one.stage, []).append(one.visit(session))
    for by_stage in found.values():
        for visits in by_stage.values():
            visits.sort(key=lambda visit: (visit.session.sweep, visit.process))
    return found


def of_sweep(
    connection: Connection, version: KernelVersion, device: Device, problem: Problem, sweep: int
) -> dict[NamedInts, list[Timed]]:
    """Config -> what one sweep's finals of a problem timed so far, ended or not."""
    mine = _candidates(version, device, problem).add_columns(Configs.items)
    configs = {row.id: row.items or NamedInts() for row in connection.execute(mine)}
    found: dict[NamedInts, list[Timed]] = {}
    for one in timed(connection, mine.with_only_columns(Candidates.id), [sweep]):
        found.setdefault(configs[one.candidate], []).append(one)
    return found


def tick_us(
    connection: Connection, version: KernelVersion, device: Device, problem: Problem, sweep: int
) -> float | None:
    """The smallest step between two samples of a block in one sweep's finals of a problem."""
    mine = _candidates(version, device, problem)
    query = select(func.min(Trials.tick_us)).where(Trials.candidate_id.in_(mine), Trials.sweep_id == sweep)
    found: float | None = connection.execute(query.where(Trials.stage != "screen")).scalar()
    return found


def _candidates(version: KernelVersion, device: Device, problem: Problem) -> Select[Any]:
    """The ids of all candidates of one problem, kernel version and device."""
    return (
        select(Candidates.id)
        .join(Configs, Configs.id == Candidates.config_id)
        .join(KernelVersions, KernelVersions.id == Candidates.version_id)
        .where(KernelVersions.kernel == version.kernel, KernelVersions.source_hash == version.source_hash)
        .where(Candidates.device_id.in_(device_ids(device)), Candidates.problem_id.in_(problem_ids(problem)))
    )


def has_rivals(connection: Connection, device: Device | None) -> bool:
    """Whether more finals than one count for some problem (on a device)."""
    mine = None if device is None else set(connection.execute(device_ids(device)).scalars())
    by_subject = Sessions.load(connection).by_subject
    return any(len(sessions) > 1 for subject, sessions in by_subject.items() if mine is None or subject[2] in mine)
