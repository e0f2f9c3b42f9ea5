"""What the trials of each candidate come to, from one pass over an index that covers all that ranking asks.

Rows are grouped here: to join a candidate's blocks to a text in SQL, and to split it again, costs twice as much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Double, Integer, Select, String, select, type_coerce

from fp8tune.errors import DatabaseError
from fp8tune.records import Kind, Status
from fp8tune.store import unreadable
from fp8tune.store.packed import Pool
from fp8tune.store.postgresql import ServerError
from fp8tune.store.references import Ended
from fp8tune.store.schema import STAGES, Trials

_AT_ONCE = 10_000
"""Rows in memory at a time."""

_TEXT = {"stage", "status"}
_REAL = {"time_us", "created_at"}
_STATUSES = {str(status): status for status in Status}
_COLUMNS = ("candidate_id", "stage", "worker_id", "status", "time_us", "created_at", "sweep_id", "round")

Block = tuple[int, float]
"""Round and microseconds."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What the trials of one candidate come to."""

    newest: Mapping[Status, float]
    """When a trial last ended so, seconds since the epoch."""
    sweeps: frozenset[int]
    """The ids of all sweeps that its rows come from."""
    times_us: tuple[float, ...]
    """Of the screen: one time a process, sorted, so that the order of insertion leaves no trace."""
    screen_us: float | None
    """One time for the screen of one sweep in which a worker was replaced, or which was broken off and continued."""
    finals: Mapping[tuple[str, int, int], tuple[Block, ...]]
    """(stage, sweep's id, worker's id) -> its blocks in the finals, in the order of the rounds."""
    doubted: tuple[Ended, ...] = ()
    """All trials if any was wrong; without their references."""

    def screened_us(self, kind: Kind) -> tuple[float, ...]:
        """One time a process; one a sweep where it was screened: who ran which round must make no difference."""
        return self.times_us if self.screen_us is None or kind is Kind.PUBLISHED else (self.screen_us,)


def summaries(connection: Connection, candidates: Select[Any]) -> Iterator[tuple[int, Summary]]:
    """The summary of every candidate that has trials, by rising id; ``candidates`` selects the ids."""
    query = select(*map(_unchecked, _COLUMNS)).where(Trials.c.candidate_id.in_(candidates))
    last = None
    try:
        for last, summary in _summaries(connection, query):
            yield last, summary
    except ServerError:
        raise
    except DatabaseError:  # a text that the driver cannot read, if no worse damage
        with unreadable.any_text(connection):
            yield from _summaries(connection, query if last is None else query.where(Trials.c.candidate_id > last))


def packed_summaries(pool: Pool, among: Container[int] | None = None) -> Iterator[tuple[int, Summary]]:
    """The summary of every candidate of a packed pool, or of some, by rising id."""
    rows = sorted(pool.rows(Trials, _COLUMNS), key=itemgetter(0))
    for candidate, mine in itertools.groupby(rows, itemgetter(0)):
        if among is None or candidate in among:
            yield candidate, _summary(mine)


def _summaries(connection: Connection, query: Select[Any]) -> Iterator[tuple[int, Summary]]:
    result = connection.execute(query.order_by(Trials.c.candidate_id), execution_options={"yield_per": _AT_ONCE})
    rows = itertools.chain.from_iterable(result.partitions())
    for candidate, mine in itertools.groupby(rows, itemgetter(0)):
        try:
            summary = _summary(mine)
        except (KeyError, TypeError, ValueError, OverflowError):
            if not (readable := _readable(connection, candidate)):
                continue
            summary = _summary(readable)
        yield candidate, summary


def _readable(connection: Connection, candidate: int) -> list[Sequence[Any]]:
    """The trials of one candidate that can be read; the others are noted."""
    query = select(*(Trials.c[name] for name in _COLUMNS)).where(Trials.c.candidate_id == candidate)
    return list(unreadable.one_by_one(connection, query))


def _unchecked(name: str) -> Any:
    """A column as the driver gives it: checking each value takes longer than reading them all."""
    return type_coerce(Trials.c[name], String() if name in _TEXT else Double() if name in _REAL else Integer())


def _summary(rows: Iterable[Sequence[Any]]) -> Summary:
    """Raises KeyError, TypeError or ValueError for what no trial holds."""
    rows = list(rows)
    newest: dict[str, float] = {}
    sweeps: set[int] = set()
    screened: set[int] = set()
    by_worker: dict[int, list[float]] = {}
    finals: dict[tuple[str, int, int], list[Block]] = {}
    for _, stage, worker, status, time_us, created_at, sweep, round in rows:
        sweeps.add(sweep)
        if created_at > newest.get(status, -math.inf):
            newest[status] = created_at
        if status == "ok" and stage == "screen":
            screened.add(sweep)
            if time_us is not None:
                by_worker.setdefault(worker, []).append(time_us)
        elif status == "ok" and time_us is not None:
            finals.setdefault((stage, sweep, worker), []).append((round, time_us))
    return Summary(
        newest={_STATUSES[status]: _finite(created_at) for status, created_at in newest.items()},
        sweeps=frozenset(sweeps),
        times_us=tuple(sorted([_value_us(times_us) for times_us in by_worker.values()])),
        screen_us=_value_us(itertools.chain(*by_worker.values())) if len(by_worker) > 1 == len(screened) else None,
        finals={place: _in_order(place[0], blocks) for place, blocks in finals.items()},
        doubted=tuple(map(_ended, rows)) if Status.WRONG in newest else (),
    )


def _ended(row: Sequence[Any]) -> Ended:
    _, stage, _, status, _, created_at, sweep, round = row
    return Ended(_STATUSES[status], _finite(created_at), stage, round, sweep)


def _value_us(times_us: Iterable[float]) -> float:
    """The mean of blocks without the least and the most, to 1e-6 us: a sum's last digits hang on its terms' order."""
    ordered = sorted(times_us)
    if not 0 < ordered[0] <= ordered[-1] < math.inf:
        raise ValueError("no time")
    middle = ordered[1:-1] if len(ordered) > 2 else ordered
    return round(1e6 * sum(middle) / len(middle)) / 1e6


def _in_order(stage: str, blocks: Sequence[Block]) -> tuple[Block, ...]:
    if stage not in STAGES or not all(isinstance(round, int) and 0 < time_us < math.inf for round, time_us in blocks):
        raise ValueError("no block")
    return tuple(sorted(blocks))


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number
