"""Work queue: units of work, leased to workers with fencing tokens.

A lease ends unless its worker renews it. Each lease has a token of its own, and every write of a fenced store names it,
so a worker that was suspended and lost its unit can neither finish it nor store rows for it. All moments are the
database server's clock; a file has one host, whose clock counts.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, case, delete, func, select, update

from fp8tune.errors import DatabaseError
from fp8tune.redaction import redacted
from fp8tune.store.database import Database, insert_ignoring, reads, writes
from fp8tune.store.schema import QueuedSweeps, Units, UnitState
from fp8tune.store.texts import parse_document
from fp8tune.store.write import stored_command
from fp8tune.text import visible

LEASE_S = 45.0
RENEWALS = 4
"""Renewals in the length of a lease: three may be missed."""

MAX_ATTEMPTS = 5
"""A preempted machine meets a unit of a minute once in sixty; five in a row are the unit's fault."""


class LeaseLostError(DatabaseError):
    """The unit belongs to another worker by now, or to nobody."""


@dataclass(frozen=True)
class QueuedSweep:
    """A sweep whose work is shared out in units."""

    key: str
    """The same for the same options, shapes, code and device name: adding it twice adds nothing."""
    device: str
    """Device name that it is for."""
    document: str
    """Options and shapes as a JSON object."""
    command: str = ""
    created_at: float = 0.0


@dataclass(frozen=True)
class Unit:
    """Problems of one kernel that one worker does."""

    key: str
    sweep_key: str
    position: int
    kernel: str
    source_hash: str
    """Hash of the kernel's code: a worker with other code leaves the unit alone."""
    problems: tuple[str, ...]
    """Keys of the problems."""
    shapes: tuple[str, ...] = ()
    expected_s: float = 0.0
    """Longer units are taken first, so that workers end together."""


@dataclass(frozen=True)
class Lease:
    """The right to do one unit until it expires."""

    unit: Unit
    sweep: QueuedSweep
    token: str
    attempt: int
    seconds: float = LEASE_S


@dataclass(frozen=True)
class UnitStatus:
    """A unit and what has become of it."""

    unit: Unit
    state: UnitState
    attempts: int = 0
    worker: str = ""
    since_s: float | None = None
    """Seconds since it was taken."""
    seconds: float | None = None
    """Duration, if it is done."""
    lease_left_s: float | None = None
    """Below zero if the lease has ended and nobody asked yet."""
    reason: str = ""
    """Why it failed or came back; if done, that no config is right on some of its problems."""

    @property
    def is_finding(self) -> bool:
        """True if it is done, with a problem that no config is right on."""
        return self.state is UnitState.DONE and bool(self.reason)


@dataclass(frozen=True)
class Queue:
    """Queued sweeps with their units, oldest first."""

    sweeps: tuple[QueuedSweep, ...] = ()
    units: tuple[UnitStatus, ...] = ()
    now: float = field(default=0.0, compare=False)

    @property
    def counts(self) -> Counter[UnitState]:
        """Number of units by state."""
        return Counter(status.state for status in self.units)

    def in_state(self, state: UnitState) -> list[UnitStatus]:
        """Return the units in a state."""
        return [status for status in self.units if status.state is state]


class Queueing(Database):
    """Methods of the work queue."""

    @writes
    def add_units(self, sweep: QueuedSweep, units: Sequence[Unit]) -> int:
        """Add a sweep and its units. What is there stays, but failed units wait again. Returns how many are new."""
        parse_document(sweep.document)
        row = {**vars(sweep), "command": stored_command(sweep.command), "created_at": self._now()}
        self._connection.execute(insert_ignoring(self._connection, QueuedSweeps), row)
        failed = (Units.c.sweep_key == sweep.key, Units.c.state == "failed")
        self._connection.execute(update(Units).where(*failed).values(**_NOT_TAKEN, attempts=0))
        documents = [json.dumps({"keys": unit.problems, "shapes": unit.shapes}) for unit in units]
        rows = [{**vars(unit), "problems": text} for unit, text in zip(units, documents, strict=True)]
        rows = [{name: value for name, value in row.items() if name != "shapes"} for row in rows]
        adding, counted = insert_ignoring(self._connection, Units), {"preserve_rowcount": True}
        return self._connection.execute(adding, rows, execution_options=counted).rowcount if rows else 0

    @writes
    def take_unit(
        self,
        device: str,
        worker: str,
        *,
        last_kernel: str = "",
        without: Collection[str] = (),
        lease_s: float = LEASE_S,
    ) -> Lease | None:
        """Lease the next unit for a device name; None if none is waiting.

        The longest comes first; of several one of ``last_kernel``, whose configs the worker has compiled, else of the
        kernel that the fewest workers do. Sweeps whose keys are in ``without`` are those that the worker cannot do.
        """
        self.return_expired_units()
        now, c = self._now(), QueuedSweeps.c
        running = select(Units.c.kernel, func.count()).where(Units.c.state == "running").group_by(Units.c.kernel)
        workers = {row[0]: row[1] for row in self._connection.execute(running)}
        order = [Units.c.expected_s.desc(), Units.c.kernel != last_kernel]
        order += [case(workers, value=Units.c.kernel, else_=0)] if workers else []
        query = select(*Units.c, c.device, c.document, c.command, c.created_at).join(QueuedSweeps)
        query = query.where(c.device == device, Units.c.state == "waiting", Units.c.sweep_key.not_in(list(without)))
        row = self._connection.execute(query.order_by(*order, c.created_at, Units.c.position).limit(1)).first()
        if row is None:
            return None
        token, attempt = uuid.uuid4().hex, int(row.attempts) + 1
        taken = {"state": "running", "attempts": attempt, "worker": visible(worker), "token": token, "taken_at": now}
        taken |= {"expires_at": now + lease_s, "ended_at": None, "reason": ""}
        self._connection.execute(update(Units).where(Units.c.key == row.key).values(**taken))
        sweep = QueuedSweep(row.sweep_key, row.device, row.document, row.command, row.created_at)
        return Lease(_unit(row), sweep, token, attempt, lease_s)

    @writes
    def renew_lease(self, lease: Lease) -> None:
        """Extend a lease from now on. Raises LeaseLostError."""
        self._as_owner(lease, "", expires_at=self._now() + lease.seconds)

    @writes
    def finish_unit(self, lease: Lease, finding: str = "") -> None:
        """Mark a unit as done, with what was found of its problems. Raises LeaseLostError."""
        self._as_owner(lease, finding, expires_at=None, ended_at=self._now(), state="done")

    @writes
    def fail_unit(self, lease: Lease, reason: str) -> UnitState:
        """Return a unit for another attempt, or mark it as failed after the last. Raises LeaseLostError."""
        state = UnitState.WAITING if lease.attempt < MAX_ATTEMPTS else UnitState.FAILED
        self._as_owner(lease, reason, expires_at=None, ended_at=self._now(), state=str(state))
        return state

    @writes
    def give_back_unit(self, lease: Lease, reason: str) -> None:
        """Return a unit without counting the attempt. Raises LeaseLostError."""
        self._as_owner(lease, reason, **_NOT_TAKEN, attempts=lease.attempt - 1)

    def return_units_of(self, worker: str, reason: str, *, counts: bool = True) -> int:
        """Return the units of a worker that is known to be gone, without waiting for its leases to end."""
        attempts = {"state": _GIVEN_UP} if counts else {"attempts": Units.c.attempts - 1}
        return self._return_units(Units.c.worker == worker, reason, attempts)

    def return_expired_units(self) -> int:
        """Return the units whose leases have ended, as taking does. Returns how many there were."""
        reason = "its worker gave no sign of life until its lease ended"
        return self._return_units(Units.c.expires_at < self.run(self._now), reason, {"state": _GIVEN_UP})

    @writes
    def _return_units(self, gone: Any, reason: str, attempts: Mapping[str, Any]) -> int:
        values = {**_NOT_TAKEN, "ended_at": self._now(), "reason": _reason(reason), **attempts}
        units = update(Units).where(Units.c.state == "running", gone)
        return self._connection.execute(units.values(**values)).rowcount

    @writes
    def forget_units(self, sweep_key: str | None = None) -> int:
        """Remove a queued sweep and its units, or all; measured rows stay. Returns how many units went."""
        keys = select(QueuedSweeps.c.key) if sweep_key is None else [sweep_key]
        gone = self._connection.execute(delete(Units).where(Units.c.sweep_key.in_(keys))).rowcount
        self._connection.execute(delete(QueuedSweeps).where(QueuedSweeps.c.key.in_(keys)))
        return gone

    @reads
    def count_units(self, device: str | None = None, *, without: Collection[str] = ()) -> Counter[UnitState]:
        """Return the number of units by state; those of ended leases count as waiting."""
        is_expired = (Units.c.state == "running") & (Units.c.expires_at < self._now())
        state = case((is_expired, "waiting"), else_=Units.c.state)
        query = select(state, func.count()).join(QueuedSweeps).where(Units.c.sweep_key.not_in(list(without)))
        query = query if device is None else query.where(QueuedSweeps.c.device == device)
        return Counter({UnitState(row[0]): row[1] for row in self._connection.execute(query.group_by(state))})

    @reads
    def queue(self, sweep_keys: Collection[str] | None = None) -> Queue:
        """Return sweeps and units as they are; changes nothing, also if leases have ended."""
        now, c = self._now(), QueuedSweeps.c
        query = select(QueuedSweeps).order_by(c.created_at, c.key)
        query = query if sweep_keys is None else query.where(c.key.in_(list(sweep_keys)))
        sweeps = tuple(QueuedSweep(**row) for row in self._connection.execute(query).mappings())
        units = select(*Units.c).join(QueuedSweeps).where(Units.c.sweep_key.in_([sweep.key for sweep in sweeps]))
        rows = self._connection.execute(units.order_by(c.created_at, c.key, Units.c.position))
        return Queue(sweeps, tuple(_status(row, now) for row in rows), now)

    @contextlib.contextmanager
    def fenced(self, leases: Collection[Lease]) -> Iterator[None]:
        """Make every write raise LeaseLostError, and store nothing, once one of the leases, read anew, is lost."""

        def check(connection: Connection) -> None:
            tokens = {lease.token: lease for lease in leases}
            owned = select(Units.c.token).where(Units.c.token.in_(list(tokens)), Units.c.state == "running")
            if lost := tokens.keys() - set(connection.scalars(owned)):
                raise _lost(tokens[min(lost)])

        before, self._fence = self._fence, check
        try:
            yield
        finally:
            self._fence = before

    def _now(self) -> float:
        if not self.is_server:
            return time.time()
        return float(self._connection.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0.0)

    def _as_owner(self, lease: Lease, reason: str, **values: Any) -> None:
        owned = (Units.c.key == lease.unit.key, Units.c.token == lease.token)
        values |= {"reason": _reason(reason)} if "state" in values else {}
        running = update(Units).where(*owned, Units.c.state == "running")
        if self._connection.execute(running.values(**values)).rowcount != 1:
            # A commit whose answer was lost is repeated: a unit that is already so is not lost.
            same = select(Units.c.key).where(*owned, Units.c.state == values.get("state"))
            if self._connection.scalar(same) is None:
                raise _lost(lease)


_NOT_TAKEN: Mapping[str, Any] = {"state": "waiting", "token": "", "taken_at": None, "expires_at": None}
_GIVEN_UP = case((Units.c.attempts >= MAX_ATTEMPTS, "failed"), else_="waiting")


def _lost(lease: Lease) -> LeaseLostError:
    unit = lease.unit
    return LeaseLostError(f"unit {unit.key} of {unit.kernel} was given to another worker: its lease had ended")


def _reason(text: str) -> str:
    return visible(redacted(text))[:2000]


def _unit(row: Any) -> Unit:
    document = parse_document(row.problems)
    keys, shapes = document.get("keys"), document.get("shapes")
    if not isinstance(keys, list) or not isinstance(shapes, list):
        raise DatabaseError(f"unit {row.key} does not name its problems: run fp8tune db forget sweep:{row.sweep_key}")
    named = tuple(map(str, keys)), tuple(map(str, shapes))
    return Unit(row.key, row.sweep_key, row.position, row.kernel, row.source_hash, *named, row.expected_s)


def _status(row: Any, now: float) -> UnitStatus:
    is_done = row.state == "done" and row.taken_at is not None and row.ended_at is not None
    return UnitStatus(
        unit=_unit(row),
        state=UnitState(row.state),
        attempts=row.attempts,
        worker=row.worker,
        since_s=None if row.taken_at is None else now - row.taken_at,
        seconds=row.ended_at - row.taken_at if is_done else None,
        lease_left_s=None if row.expires_at is None else row.expires_at - now,
        reason=row.reason,
    )
