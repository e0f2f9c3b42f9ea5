"""Units of work in a database, and the leases of the workers who do them: the statements behind the store.

A unit is *waiting*, *running*, *done* or *failed*. Whoever takes one gets a lease: a token that nobody else has, which
ends after :data:`LEASE_S` unless it is renewed. A lease that ended gives its unit back. Every statement about a taken
unit names the token, and so does every write of a store that is :meth:`fp8tune.store.results.Store.fenced`: a worker
that was stopped for a while and lost its unit can neither finish it nor store rows for it.

All moments are those of the database server, so the clocks of hosts need not agree. A file has one host, whose clock
counts.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, Select, Update, case, delete, func, select, update

from fp8tune.errors import DatabaseError
from fp8tune.store import optional
from fp8tune.store.schema import QueuedSweeps, Units
from fp8tune.store.writing import insert_ignoring

LEASE_S = 45.0
"""A lease that was not renewed for so long ends: within a minute with what a renewal may wait for a lock."""

RENEWALS = 4
"""In the length of a lease: three may be missed."""

MOST_ATTEMPTS = 5
"""A unit that failed, or whose worker went away, so often is not given out again. Machines that are taken back in an
hour meet a unit of a minute once in sixty; five times in a row is the unit's own doing."""


class LeaseLostError(DatabaseError):
    """The unit is another worker's by now, or nobody's."""


class UnitState(StrEnum):
    """What has become of a unit."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class QueuedSweep:
    """A sweep whose work is shared out in units."""

    key: str
    """The same for the same options, shapes, code and device name: adding it twice adds nothing."""
    device: str
    """The device name that it is for: only workers with such a device take its units."""
    document: str
    """Options and shapes as a JSON object, of which any host rebuilds the plan (:mod:`fp8tune.fleet.units`)."""
    command: str = ""
    created_at: float = 0.0
    """Seconds since the epoch, by the server's clock."""


@dataclass(frozen=True)
class Unit:
    """Problems of one kernel that one worker does, screen and finals."""

    key: str
    sweep_key: str
    position: int
    """In its sweep."""
    kernel: str
    source_hash: str
    """Of the kernel's code: a worker with other code leaves the unit alone."""
    problems: tuple[str, ...]
    """Keys of the problems (:func:`fp8tune.fleet.units.problem_key`)."""
    shapes: tuple[str, ...] = ()
    """The same for people."""
    worth: float = 1.0
    """Units of more worth are taken first."""
    expected_s: float = 0.0
    """Seconds that it is expected to take on one device; only ratios are relied on."""


@dataclass(frozen=True)
class Lease:
    """The right to do one unit."""

    unit: Unit
    sweep: QueuedSweep
    token: str
    attempt: int
    """Counted from 1."""
    seconds: float = LEASE_S
    """After which it ends, from when it was taken or renewed."""


@dataclass(frozen=True)
class UnitStatus:
    """A unit and what has become of it."""

    unit: Unit
    state: UnitState
    attempts: int = 0
    worker: str = ""
    """Who has it or had it last: host, process and device."""
    since_s: float | None = None
    """Seconds since it was taken; None if it was not."""
    seconds: float | None = None
    """What it took, where it is done."""
    lease_left_s: float | None = None
    """Until its lease ends; below zero where the lease has ended and nobody asked yet."""
    reason: str = ""
    """Why it failed or was given back; where it is done, that no config is right on some of its problems."""

    @property
    def is_finding(self) -> bool:
        """Whether it is done, but with a problem that no config is right on."""
        return self.state is UnitState.DONE and bool(self.reason)


@dataclass(frozen=True)
class Queue:
    """All sweeps that were queued, with their units, oldest first."""

    sweeps: tuple[QueuedSweep, ...] = ()
    units: tuple[UnitStatus, ...] = ()
    now: float = field(default=0.0, compare=False)
    """By the server's clock."""

    @property
    def counts(self) -> Counter[UnitState]:
        """How many units are in which state."""
        return Counter(of.state for of in self.units)

    def of(self, state: UnitState) -> list[UnitStatus]:
        """The units in a state."""
        return [of for of in self.units if of.state is state]


def now(connection: Connection) -> float:
    """Seconds since the epoch by the server's clock; by this host's for a file."""
    if connection.dialect.name == "sqlite":
        return time.time()
    return float(connection.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0.0)


def add(connection: Connection, sweep: QueuedSweep, units: Sequence[Unit]) -> int:
    """Queue a sweep and its units; what is there already stays as it is. Returns how many units are new."""
    values = {**vars(sweep), "created_at": now(connection)}
    connection.execute(insert_ignoring(QueuedSweeps, connection.dialect.name), values)
    if not units:
        return 0
    rows = [{**_stored(unit), **_NOT_TAKEN, "attempts": 0, "worker": "", "reason": ""} for unit in units]
    statement = insert_ignoring(Units, connection.dialect.name)
    return int(connection.execute(statement, rows, execution_options={"preserve_rowcount": True}).rowcount)


def take(
    connection: Connection, device: str, worker: str, *, last_kernel: str, without: Collection[str], lease_s: float
) -> Lease | None:
    """The next unit for a device name, with a lease; None where none is waiting.

    Of the most worth first; of these one of ``last_kernel``, whose configs are compiled, else of the kernel that the
    fewest workers are at; of these the longest. ``without``: keys of sweeps that the worker cannot do.
    """
    at = now(connection)
    return_expired(connection, at)
    busy = select(Units.c.kernel, func.count()).where(Units.c.state == "running").group_by(Units.c.kernel)
    running = {row[0]: row[1] for row in connection.execute(busy)}
    order: list[Any] = [Units.c.worth.desc()]
    if last_kernel:
        order.append(case((Units.c.kernel == last_kernel, 0), else_=1))
    if running:
        order.append(case(running, value=Units.c.kernel, else_=0))
    order += [Units.c.expected_s.desc(), QueuedSweeps.c.created_at, Units.c.position]
    waiting = Units.c.state == "waiting", Units.c.sweep_key.not_in(list(without))
    of = QueuedSweeps.c
    query: Select[Any] = select(*Units.c, of.device, of.document, of.command, of.created_at)
    query = query.join(QueuedSweeps, of.key == Units.c.sweep_key).where(of.device == device, *waiting)
    query = query.order_by(*order).limit(1)
    found = connection.execute(query).first()
    if found is None:
        return None
    token, attempt = uuid.uuid4().hex, int(found.attempts) + 1
    values = {"state": "running", "attempts": attempt, "worker": worker, "token": token, "taken_at": at}
    values |= {"expires_at": at + lease_s, "ended_at": None}
    is_mine = Units.c.key == found.key, Units.c.state == "waiting"
    if connection.execute(update(Units).where(*is_mine).values(**values)).rowcount != 1:
        return None  # cannot be while writers queue for one lock
    sweep = QueuedSweep(found.sweep_key, found.device, found.document, found.command, found.created_at)
    return Lease(_unit(found), sweep, token, attempt, lease_s)


def renew(connection: Connection, lease: Lease) -> None:
    """Have the lease last as long from now. Raises LeaseLostError."""
    _as_owner(connection, lease, expires_at=now(connection) + lease.seconds)


def check(connection: Connection, lease: Lease) -> None:
    """Raise LeaseLostError unless the unit is still this lease's."""
    query = select(Units.c.key).where(*_owned(lease))
    if connection.scalar(query) is None:
        raise _lost(lease)


def finish(connection: Connection, lease: Lease, finding: str) -> None:
    """The unit is done. Raises LeaseLostError: of all workers that had it, one finishes it."""
    _as_owner(connection, lease, state="done", token="", expires_at=None, ended_at=now(connection), reason=finding)


def fail(connection: Connection, lease: Lease, reason: str) -> UnitState:
    """The unit could not be done: it waits for another try, or has *failed* after :data:`MOST_ATTEMPTS`.

    Raises LeaseLostError.
    """
    state = "waiting" if lease.attempt < MOST_ATTEMPTS else "failed"
    _as_owner(connection, lease, **{**_NOT_TAKEN, "state": state, "ended_at": now(connection), "reason": reason})
    return UnitState(state)


def give_back(connection: Connection, lease: Lease, reason: str) -> None:
    """The unit waits again, and the attempt does not count. Raises LeaseLostError."""
    _as_owner(connection, lease, **_NOT_TAKEN, attempts=lease.attempt - 1, reason=reason)


def return_of(connection: Connection, worker: str, reason: str, *, counts: bool) -> int:
    """Give back at once what a worker has that is known to be gone. Returns how many units there were.

    ``counts``: whether the attempt does, as that of a worker whose lease ended.
    """
    mine = Units.c.state == "running", Units.c.worker == worker
    too_often = Units.c.attempts >= MOST_ATTEMPTS
    values: dict[str, Any] = {**_NOT_TAKEN, "ended_at": now(connection), "reason": reason}
    if counts:
        values["state"] = case((too_often, "failed"), else_="waiting")
    else:
        values["attempts"] = Units.c.attempts - 1
    return connection.execute(update(Units).where(*mine).values(**values)).rowcount


def return_expired(connection: Connection, at: float | None = None) -> int:
    """Give back the units whose leases have ended. Returns how many there were."""
    at = now(connection) if at is None else at
    ended = Units.c.state == "running", Units.c.expires_at < at
    too_often = Units.c.attempts >= MOST_ATTEMPTS
    gone = "its worker gave no sign of life until its lease ended"
    values = {**_NOT_TAKEN, "state": case((too_often, "failed"), else_="waiting"), "ended_at": at, "reason": gone}
    return connection.execute(update(Units).where(*ended).values(**values)).rowcount


def retry_failed(connection: Connection) -> int:
    """Have units that failed wait again, with all attempts. Returns how many there were."""
    failed = update(Units).where(Units.c.state == "failed")
    return connection.execute(failed.values(**_NOT_TAKEN, attempts=0)).rowcount


def forget(connection: Connection, key: str | None) -> int:
    """Remove a queued sweep with its units, or all; rows that were measured stay. Returns how many units went."""
    of_sweep = () if key is None else (Units.c.sweep_key == key,)
    gone = connection.execute(delete(Units).where(*of_sweep)).rowcount
    connection.execute(delete(QueuedSweeps).where(*(() if key is None else (QueuedSweeps.c.key == key,))))
    return gone


def counts(connection: Connection, device: str | None, without: Collection[str]) -> Counter[UnitState]:
    """How many units of a device name (None: of any) are in which state. Units of ended leases count as waiting."""
    if not optional.is_there(connection, Units):
        return Counter()
    state = case(
        ((Units.c.state == "running") & (Units.c.expires_at < now(connection)), "waiting"), else_=Units.c.state
    )
    query = select(state, func.count()).join(QueuedSweeps, QueuedSweeps.c.key == Units.c.sweep_key)
    query = query.where(Units.c.sweep_key.not_in(list(without)))
    if device is not None:
        query = query.where(QueuedSweeps.c.device == device)
    return Counter({UnitState(row[0]): row[1] for row in connection.execute(query.group_by(state))})


def queue(connection: Connection, sweep_keys: Collection[str] | None = None) -> Queue:
    """Sweeps and units as they are; None means all. Changes nothing, also where leases have ended."""
    if not (optional.is_there(connection, QueuedSweeps) and optional.is_there(connection, Units)):
        return Queue()
    at = now(connection)
    query = select(QueuedSweeps).order_by(QueuedSweeps.c.created_at, QueuedSweeps.c.key)
    if sweep_keys is not None:
        query = query.where(QueuedSweeps.c.key.in_(list(sweep_keys)))
    sweeps = tuple(QueuedSweep(**row) for row in connection.execute(query).mappings())
    # without the sweep's document, which a thousand units would bring a thousand times
    units = select(*Units.c).join(QueuedSweeps, QueuedSweeps.c.key == Units.c.sweep_key)
    units = units.where(Units.c.sweep_key.in_([sweep.key for sweep in sweeps]))
    rows = connection.execute(units.order_by(QueuedSweeps.c.created_at, QueuedSweeps.c.key, Units.c.position))
    return Queue(sweeps, tuple(_status(row, at) for row in rows), at)


_NOT_TAKEN: Mapping[str, Any] = {"state": "waiting", "token": "", "taken_at": None, "expires_at": None}


def _owned(lease: Lease) -> tuple[Any, ...]:
    return Units.c.key == lease.unit.key, Units.c.token == lease.token, Units.c.state == "running"


def _as_owner(connection: Connection, lease: Lease, **values: Any) -> None:
    changed: Update = update(Units).where(*_owned(lease)).values(**values)
    if connection.execute(changed).rowcount != 1:
        raise _lost(lease)


def _lost(lease: Lease) -> LeaseLostError:
    unit = lease.unit
    return LeaseLostError(f"unit {unit.key} of {unit.kernel} was given to another worker: its lease had ended")


def _stored(unit: Unit) -> dict[str, Any]:
    values = {name: value for name, value in vars(unit).items() if name not in ("problems", "shapes")}
    return {**values, "problems": json.dumps({"keys": unit.problems, "shapes": unit.shapes})}


def _unit(row: Row[Any]) -> Unit:
    said = json.loads(row.problems)
    try:
        problems, shapes = tuple(map(str, said["keys"])), tuple(map(str, said["shapes"]))
    except (KeyError, TypeError):
        raise DatabaseError(f"unit {row.key} does not say its problems: run fp8tune queue --forget all") from None
    place = row.key, row.sweep_key, row.position, row.kernel, row.source_hash
    return Unit(*place, problems, shapes, row.worth, row.expected_s)


def _status(row: Row[Any], at: float) -> UnitStatus:
    is_done = row.state == "done" and row.taken_at is not None and row.ended_at is not None
    return UnitStatus(
        unit=_unit(row),
        state=UnitState(row.state),
        attempts=row.attempts,
        worker=row.worker,
        since_s=None if row.taken_at is None else at - row.taken_at,
        seconds=row.ended_at - row.taken_at if is_done else None,
        lease_left_s=None if row.expires_at is None else row.expires_at - at,
        reason=row.reason,
    )
