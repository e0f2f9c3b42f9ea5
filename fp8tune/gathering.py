"""One record a candidate: how a million trials become what is ranked.

Trials are aggregated inside the database, from one covering index and without touching a blob. Where many kernel
versions, devices or drivers have rows, those that cannot compete are left out before a record is made of them.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import BigInteger, Connection, Select, String, and_, case, cast, false, func, or_, select

from fp8tune.errors import DatabaseError
from fp8tune.reading import Shared, chosen, facts, last_status
from fp8tune.records import Evidence, Kind, Pool, Status
from fp8tune.schema import Calibrations, Candidates, Completions, Trials

Keep = Callable[[Sequence[Pool]], Collection[Pool]]
"""All pools -> those to read: :func:`fp8tune.ranking.competing`."""

_Ids = tuple[int, int, int, str]
"""A pool's problem, version, device and kind."""

_POOL = (Candidates.problem_id, Candidates.version_id, Candidates.device_id, Candidates.kind)


def evidence(
    connection: Connection,
    kernel: str | None,
    arch: str | None,
    kinds: Collection[Kind] | None,
    ceiling: str,
    keep: Keep | None = None,
) -> list[Evidence]:
    """One record a candidate that has trials; ``ceiling`` names the calibration to attach."""
    shared = Shared.load(connection)
    completed = {tuple(row) for row in connection.execute(_COMPLETED)}
    ceilings = _ceilings(connection, ceiling)
    wanted = chosen(kernel, arch, kinds)
    if keep is not None:
        pools = _pools(connection, wanted, shared, completed)
        wanted = wanted.where(_in_pools([pools[pool] for pool in keep(list(pools))]))
    query = select(*Candidates.__table__.c).order_by(Candidates.id)
    all_of_them = _count(connection, wanted) == _count(connection, select(Candidates.id))
    rows = connection.execute(query if all_of_them else query.where(Candidates.id.in_(wanted))).all()
    with _collecting_no_garbage():
        summaries = _summaries(connection, None if all_of_them else wanted)  # to look each one up would cost more
        return [_evidence(row, shared, summaries[row.id], completed, ceilings) for row in rows if row.id in summaries]


def _count(connection: Connection, ids: Select[Any]) -> int:
    return connection.execute(select(func.count()).select_from(ids.subquery())).scalar_one()


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Records refer to each other in no circle: walking all of them again and again would double the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_COMPLETED = select(Completions.version_id, Completions.device_id, Completions.problem_id).distinct()


def _ceilings(connection: Connection, name: str) -> dict[tuple[int | None, int], float]:
    """(sweep, device) -> the value measured there; (None, device) -> the device's newest."""
    query = select(Calibrations).where(Calibrations.name == name).order_by(Calibrations.created_at, Calibrations.id)
    found: dict[tuple[int | None, int], float] = {}
    for row in connection.execute(query.with_only_columns(*Calibrations.__table__.c)):
        found[row.sweep_id, row.device_id] = found[None, row.device_id] = row.value
    return found


# Pools


def _pools(
    connection: Connection, wanted: Select[Any], shared: Shared, completed: set[tuple[Any, ...]]
) -> dict[Pool, _Ids]:
    """Every pool of the wanted candidates. When a pool was last timed is looked up only where a problem has two."""
    query = select(*_POOL).where(Candidates.id.in_(wanted)).distinct()
    found: list[_Ids] = [(row[0], row[1], row[2], row[3]) for row in connection.execute(query)]
    rivals = len({problem for problem, *_ in found}) < len(found)
    newest = _last_timed(connection) if rivals else {}
    return {
        Pool(
            problem=shared.problems[problem],
            device=shared.devices[device],
            kind=Kind(kind),
            version=shared.versions[version],
            complete=_is_complete(kind, (version, device, problem), completed),
            newest=newest.get((problem, version, device, kind), 0.0),
        ): (problem, version, device, kind)
        for problem, version, device, kind in found
    }


def _last_timed(connection: Connection) -> dict[_Ids, float]:
    times = select(Trials.candidate_id, func.max(Trials.created_at).label("newest"))
    timed = times.where(Trials.time_us.is_not(None)).group_by(Trials.candidate_id).subquery()
    query = select(*_POOL, func.max(timed.c.newest)).join(timed, timed.c.candidate_id == Candidates.id)
    return {(row[0], row[1], row[2], row[3]): row[4] for row in connection.execute(query.group_by(*_POOL))}


def _in_pools(pools: Iterable[_Ids]) -> Any:
    """The condition that a candidate belongs to one of these pools."""
    problems: dict[tuple[int, int, str], list[int]] = {}
    for problem, version, device, kind in pools:
        problems.setdefault((version, device, kind), []).append(problem)
    same = [
        and_(
            Candidates.version_id == version,
            Candidates.device_id == device,
            Candidates.kind == kind,
            Candidates.problem_id.in_(ids),
        )
        for (version, device, kind), ids in problems.items()
    ]
    return or_(false(), *same)


def _is_complete(kind: str, swept: tuple[int, int, int], completed: set[tuple[Any, ...]]) -> bool:
    """``swept``: version, device and problem. A publication is as complete as it will ever be."""
    return kind == Kind.PUBLISHED or swept in completed


# Summaries


@dataclass
class _Summary:
    """What the trials of one candidate come to."""

    newest: dict[Status, float] = field(default_factory=dict)
    times_us: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """stage -> one time a process, sorted, so that the order of insertion leaves no trace."""
    screen_us: float | None = None
    """One time for the screen of one sweep in which a worker was replaced, or which was broken off and continued."""
    sweep: int = 0

    def replicates_us(self, stage: str, kind: Kind) -> tuple[float, ...]:
        """One time a process; one a sweep where it was screened: who ran which round must make no difference."""
        if stage == "screen" and self.screen_us is not None and kind is not Kind.PUBLISHED:
            return (self.screen_us,)
        return self.times_us.get(stage, ())


def _summaries(connection: Connection, candidates: Select[Any] | None) -> dict[int, _Summary]:
    found: defaultdict[int, _Summary] = defaultdict(_Summary)
    for candidate, stage, joined, least, most, total, blocks, newest, first, last in connection.execute(
        _timed(candidates)
    ).all():
        summary = found[candidate]
        if joined is not None:
            times_us = summary.times_us[stage] = _times_us(joined, least, most)
            if stage == "screen" and len(times_us) > 1 and first == last:
                summary.screen_us = round(1e6 * _value_us(total, least, most, blocks)) / 1e6
        summary.newest[Status.OK] = max(newest, summary.newest.get(Status.OK, newest))
        summary.sweep = max(last, summary.sweep)
    for candidate, status, newest, sweep in connection.execute(_failed(candidates)):
        summary = found[candidate]
        summary.newest[Status(status)] = newest
        summary.sweep = max(sweep, summary.sweep)
    return found


def _timed(candidates: Select[Any] | None) -> Select[Any]:
    """Candidate and stage -> its processes' values as one text, and what all its blocks come to."""
    time, sweep = Trials.time_us, Trials.sweep_id
    total, least, most, blocks = func.sum(time), func.min(time), func.max(time), func.count(time)
    value_us = case((blocks > 2, (total - least - most) / (blocks - 2)), else_=total / blocks)  # as _value_us
    picoseconds = cast(func.round(value_us * 1e6), BigInteger)  # a sum's last digits hang on the order of its terms
    by_process = (
        select(Trials.candidate_id, Trials.stage, cast(picoseconds, String).label("value"))
        .add_columns(least.label("least"), most.label("most"), total.label("total"), blocks.label("blocks"))
        .add_columns(func.max(Trials.created_at).label("newest"))
        .add_columns(func.min(sweep).label("first"), func.max(sweep).label("last"))
        .where(Trials.status == str(Status.OK))
        .group_by(Trials.candidate_id, Trials.stage, Trials.worker_id)
    )
    if candidates is not None:
        by_process = by_process.where(Trials.candidate_id.in_(candidates))
    each = by_process.subquery().c
    query = select(each.candidate_id, each.stage, func.aggregate_strings(each.value, " "))
    query = query.add_columns(func.min(each.least), func.max(each.most), func.sum(each.total), func.sum(each.blocks))
    query = query.add_columns(func.max(each.newest), func.min(each.first), func.max(each.last))
    return query.group_by(each.candidate_id, each.stage)


def _failed(candidates: Select[Any] | None) -> Select[Any]:
    """Candidate and status -> when a trial last failed in this way."""
    columns = (Trials.candidate_id, Trials.status)
    query = select(*columns).where(Trials.status != str(Status.OK)).group_by(*columns)
    if candidates is not None:
        query = query.where(Trials.candidate_id.in_(candidates))
    return query.add_columns(func.max(Trials.created_at), func.max(Trials.sweep_id))


def _value_us(total: float, least: float, most: float, blocks: int) -> float:
    """The mean of blocks without the least and the most: of three or four their median, which not every SQL has."""
    return (total - least - most) / (blocks - 2) if blocks > 2 else total / blocks


def _times_us(joined: str, least: Any, most: Any) -> tuple[float, ...]:
    """The values of one candidate's processes, given in picoseconds. Refuses what is no time."""
    if not (isinstance(least, float) and isinstance(most, float) and 0 < least <= most < math.inf):
        raise DatabaseError(f"refused {joined[:80]!r}: a time is a positive number of microseconds")
    return tuple(sorted([int(text) / 1e6 for text in joined.split(" ")]))


def _evidence(
    row: Any,
    shared: Shared,
    summary: _Summary,
    completed: set[tuple[Any, ...]],
    ceilings: Mapping[tuple[int | None, int], float],
) -> Evidence:
    status, kind = last_status(summary.newest), Kind(row.kind)
    stage = "final" if "final" in summary.times_us else "screen"
    return Evidence(
        problem=shared.problems[row.problem_id],
        config=shared.configs[row.config_id],
        device=shared.devices[row.device_id],
        kind=kind,
        status=status,
        times_us=summary.replicates_us(stage, kind) if status is Status.OK else (),
        version=shared.versions[row.version_id],
        lookup_key=shared.lookup_keys[row.lookup_key_id],
        bytes_moved=row.bytes_moved,
        source=row.source,
        note=row.note,
        facts=facts(row),
        complete=_is_complete(row.kind, (row.version_id, row.device_id, row.problem_id), completed),
        ceiling_gb_per_s=ceilings.get((summary.sweep, row.device_id), ceilings.get((None, row.device_id))),
        stage=stage,
        newest=max(summary.newest.values()),
    )
