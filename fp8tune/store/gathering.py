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
from statistics import median
from typing import Any

from sqlalchemy import BigInteger, Connection, Select, String, and_, case, cast, false, func, or_, select

from fp8tune.errors import DatabaseError
from fp8tune.records import Code, Device, Evidence, Kind, Pool, Problem, Status, Visit
from fp8tune.store import visits
from fp8tune.store.reading import Shared, chosen, codes, facts, last_status
from fp8tune.store.schema import Calibrations, Candidates, Completions, Trials

Keep = Callable[[Sequence[Pool]], Collection[Pool]]
"""All pools -> those to read: :func:`fp8tune.choose.ranking.competing`."""

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
    problems: Collection[Problem] | None = None,
    device: Device | None = None,
) -> list[Evidence]:
    """One record a candidate that has trials; ``ceiling`` names the calibration to attach."""
    shared, known_codes = Shared.load(connection), codes(connection)
    completed = {tuple(row) for row in connection.execute(_COMPLETED)}
    ceilings = _ceilings(connection, ceiling)
    wanted = chosen(kernel, arch, kinds)
    if problems is not None:
        wanted = wanted.where(Candidates.problem_id.in_([id for id, one in shared.problems.items() if one in problems]))
    if device is not None:
        wanted = wanted.where(Candidates.device_id.in_([id for id, one in shared.devices.items() if one == device]))
    if keep is not None:
        pools = _pools(connection, wanted, shared, completed)
        wanted = wanted.where(_in_pools([pools[pool] for pool in keep(list(pools))]))
    query = select(*Candidates.__table__.c).order_by(Candidates.id)
    all_of_them = _count(connection, wanted) == _count(connection, select(Candidates.id))
    rows = connection.execute(query if all_of_them else query.where(Candidates.id.in_(wanted))).all()
    with _collecting_no_garbage():
        narrowed = None if all_of_them else wanted  # to look each one up would cost more
        summaries = _summaries(connection, narrowed)
        finals = visits.by_candidate(connection, narrowed, {row.id: row for row in rows})
        return [
            _evidence(
                row, shared, summaries[row.id], completed, ceilings, known_codes.get(row.id), finals.get(row.id, {})
            )
            for row in rows
            if row.id in summaries
        ]


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
    query = select(Calibrations).where(Calibrations.name == name).order_by(Calibrations.created_at, Calibrations.value)
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
    times_us: tuple[float, ...] = ()
    """Of the screen: one time a process, sorted, so that the order of insertion leaves no trace."""
    screen_us: float | None = None
    """One time for the screen of one sweep in which a worker was replaced, or which was broken off and continued."""
    sweeps: set[int] = field(default_factory=set)
    """The first and the last its rows come from."""

    def screened_us(self, kind: Kind) -> tuple[float, ...]:
        """One time a process; one a sweep where it was screened: who ran which round must make no difference."""
        return self.times_us if self.screen_us is None or kind is Kind.PUBLISHED else (self.screen_us,)


def _summaries(connection: Connection, candidates: Select[Any] | None) -> dict[int, _Summary]:
    found: defaultdict[int, _Summary] = defaultdict(_Summary)
    for candidate, joined, least, most, total, blocks, newest, first, last in connection.execute(
        _screened(candidates)
    ).all():
        summary = found[candidate]
        if joined is not None:
            times_us = summary.times_us = _times_us(joined, least, most)
            if len(times_us) > 1 and first == last:
                summary.screen_us = round(1e6 * _value_us(total, least, most, blocks)) / 1e6
        summary.newest[Status.OK] = newest
        summary.sweeps |= {first, last}
    for candidate, text, newest, first, last in connection.execute(_others(candidates)).all():
        summary, status = found[candidate], Status(text)
        summary.newest[status] = max(newest, summary.newest.get(status, newest))
        summary.sweeps |= {first, last}
    return found


def _screened(candidates: Select[Any] | None) -> Select[Any]:
    """Candidate -> its processes' values in the screen as one text, and what all its blocks come to."""
    time, sweep = Trials.time_us, Trials.sweep_id
    total, least, most, blocks = func.sum(time), func.min(time), func.max(time), func.count(time)
    value_us = case((blocks > 2, (total - least - most) / (blocks - 2)), else_=total / blocks)  # as _value_us
    picoseconds = cast(func.round(value_us * 1e6), BigInteger)  # a sum's last digits hang on the order of its terms
    by_process = (
        select(Trials.candidate_id, cast(picoseconds, String).label("value"))
        .add_columns(least.label("least"), most.label("most"), total.label("total"), blocks.label("blocks"))
        .add_columns(func.max(Trials.created_at).label("newest"))
        .add_columns(func.min(sweep).label("first"), func.max(sweep).label("last"))
        .where(Trials.stage == "screen", Trials.status == str(Status.OK))
        .group_by(Trials.candidate_id, Trials.worker_id)
    )
    if candidates is not None:
        by_process = by_process.where(Trials.candidate_id.in_(candidates))
    each = by_process.subquery().c
    query = select(each.candidate_id, func.aggregate_strings(each.value, " "))
    query = query.add_columns(func.min(each.least), func.max(each.most), func.sum(each.total), func.sum(each.blocks))
    query = query.add_columns(func.max(each.newest), func.min(each.first), func.max(each.last))
    return query.group_by(each.candidate_id)


def _others(candidates: Select[Any] | None) -> Select[Any]:
    """Candidate and status -> when a trial last ended so, of those that failed and of all finals."""
    columns = (Trials.candidate_id, Trials.status)
    wanted = or_(Trials.status != str(Status.OK), Trials.stage != "screen")
    query = select(*columns).where(wanted).group_by(*columns)
    if candidates is not None:
        query = query.where(Trials.candidate_id.in_(candidates))
    return query.add_columns(func.max(Trials.created_at), func.min(Trials.sweep_id), func.max(Trials.sweep_id))


def _value_us(total: float, least: float, most: float, blocks: int) -> float:
    """The mean of blocks without the least and the most: of three or four their median, which not every SQL has."""
    return (total - least - most) / (blocks - 2) if blocks > 2 else total / blocks


def _times_us(joined: str, least: Any, most: Any) -> tuple[float, ...]:
    """The values of one candidate's processes, given in picoseconds. Refuses what is no time."""
    if not (isinstance(least, float) and isinstance(most, float) and 0 < least <= most < math.inf):
        raise DatabaseError(f"refused {joined[:80]!r}: a time is a positive number of microseconds")
    return tuple(sorted([int(text) / 1e6 for text in joined.split(" ")]))


def _ceiling(sweeps: set[int], device: int, ceilings: Mapping[tuple[int | None, int], float]) -> float | None:
    """Of the one sweep that rows come from; of several, whose ids say nothing of their age, the device's newest."""
    sweep = next(iter(sweeps)) if len(sweeps) == 1 else None
    return ceilings.get((sweep, device), ceilings.get((None, device)))


def _evidence(
    row: Any,
    shared: Shared,
    summary: _Summary,
    completed: set[tuple[Any, ...]],
    ceilings: Mapping[tuple[int | None, int], float],
    code: Code | None,
    finals: Mapping[str, Sequence[Visit]],
) -> Evidence:
    status, kind = last_status(summary.newest), Kind(row.kind)
    screened_us, timed = summary.screened_us(kind), finals.get("final", ())
    times_us = tuple(sorted(visit.time_us for visit in timed)) or screened_us
    return Evidence(
        problem=shared.problems[row.problem_id],
        config=shared.configs[row.config_id],
        device=shared.devices[row.device_id],
        kind=kind,
        status=status,
        times_us=times_us if status is Status.OK else (),
        version=shared.versions[row.version_id],
        lookup_key=shared.lookup_keys[row.lookup_key_id],
        bytes_moved=row.bytes_moved,
        source=row.source,
        note=row.note,
        facts=facts(row, code),
        complete=_is_complete(row.kind, (row.version_id, row.device_id, row.problem_id), completed),
        ceiling_gb_per_s=_ceiling(summary.sweeps, row.device_id, ceilings),
        stage="final" if timed else "screen",
        screen_us=median(screened_us) if timed and screened_us else None,
        finals=tuple(timed),
        twin=tuple(finals.get("twin", ())),
        newest=max(summary.newest.values()),
    )
