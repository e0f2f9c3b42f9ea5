"""PostgreSQL's part of a results database: how a server is asked, and what it means when it does not answer.

Writers queue for one advisory lock, each for the length of a transaction. Each reader sees one moment. What takes a
transaction up after its connection was lost is :mod:`fp8tune.store.retrying`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from fp8tune.errors import DatabaseError
from fp8tune.store.sqlite import FOREIGN, LOCKED

WRITERS_LOCK = int.from_bytes(b"fp8tune")
"""The advisory lock that writers of one database hold for the length of a transaction."""

_CONNECT_TIMEOUT_S = 10
_LOCK_TIMEOUT_S = 10.0
"""Then the wait is said, and goes on."""

_CLIENT_KEEPALIVES = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 25000}
_SERVER_KEEPALIVES = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
"""A host that is gone is noticed within 25 s, on both sides: the server holds its lock until then. Linux: two hours."""

_PLANNER = "-c work_mem=64MB -c random_page_cost=1.1 -c cursor_tuple_fraction=1 -c jit=off"
"""Whole tables are grouped and streamed: in memory, by an index that covers the query, to the last row. With the
server's defaults ``fp8tune show`` takes a third longer at a million rows."""

_LOST = "was lost, the server ended the connection: run this again; every row stored before is kept"
_UNREACHABLE = "cannot be reached: check the host and the port, and that the server runs"
_NOT_YET = "takes no connection now (it starts, stops or is full): run this again in a minute"
LINES = {
    "55p03": LOCKED,
    "42p01": FOREIGN,  # no such table
    "42703": FOREIGN,  # no such column
    "42501": "may not be used by this user: ask the server's administrator for the right to",
    "25006": "cannot be written: ask the server's administrator for the right to, or give another one with --db",
    "53100": "could not grow, the server's disk is full: every row stored before is kept",
    "57p04": "was removed while it was in use: make the database with createdb",
    "57p": _LOST,
    "08": _LOST,
    "40": _LOST,  # a deadlock, and what else a server undoes by itself
    "starting up": _NOT_YET,
    "shutting down": _NOT_YET,
    "recovery mode": _NOT_YET,
    "not yet accepting": _NOT_YET,
    "too many": _NOT_YET,  # clients, or connections for a role
    "connection slots": _NOT_YET,
    "password": "refused the login: put the password into PGPASSWORD or ~/.pgpass, and check the user's name",
    "does not exist": "is not there: make the database with createdb, and check the user's name",
    "connection is lost": _LOST,
    "connection is closed": _LOST,
    "server closed": _LOST,
    "connection failed": _UNREACHABLE,
    "connection timeout": _UNREACHABLE,
    "resolve host": _UNREACHABLE,
}
"""SQLSTATE, or its beginning, of what the server says; of what the driver says, which has none, a part."""

_PASSING = (_LOST, _UNREACHABLE, _NOT_YET, LOCKED)


class ServerError(DatabaseError):
    """What a server or its driver says of a statement: no single row is to blame, as one that a column refuses is."""


class LostConnectionError(ServerError):
    """What the next try may find better: a connection that ended, a server that starts, a lock that another holds.

    Nothing of the transaction is stored, unless the connection was lost while it was committed.
    """

    def __init__(self, label: str, line: str, connection: Connection | None, note: str = "") -> None:
        super().__init__(f"{label} {line}{note}")
        self.label, self.connection, self._line = label, connection, line

    @property
    def is_passing(self) -> bool:
        """Whether the server is there, and says that it will answer."""
        return self._line in (_NOT_YET, LOCKED)

    @property
    def what(self) -> str:
        """What is waited for."""
        return "is locked by another process" if self._line is LOCKED else "does not answer"

    @property
    def waited_s(self) -> float:
        """What was waited before the server said so."""
        return _LOCK_TIMEOUT_S if self._line is LOCKED else 0.0

    def after(self, seconds: float) -> LostConnectionError:
        """The same at the end of the patience."""
        note = f" (waited {seconds:.0f} s)" if seconds >= 1 else ""
        return LostConnectionError(self.label, self._line, self.connection, note)


def lost(label: str, connection: Connection | None) -> LostConnectionError:
    """The error for a connection that the driver calls lost, whatever it says."""
    return LostConnectionError(label, _LOST, connection)


def error(label: str, line: str, connection: Connection | None) -> DatabaseError:
    """The error for one of :data:`LINES`."""
    return LostConnectionError(label, line, connection) if line in _PASSING else ServerError(f"{label} {line}")


def options(given: Any, patience_s: float) -> dict[str, Any]:
    """What a connection is made with, beside what its URL gives."""
    lock_ms = max(1, round(1000 * min(patience_s, _LOCK_TIMEOUT_S)))
    ours = {"connect_timeout": _CONNECT_TIMEOUT_S, "application_name": "fp8tune", **_CLIENT_KEEPALIVES}
    wanted: dict[str, Any] = {name: value for name, value in ours.items() if name not in given}
    said = given.get("options", "")
    said = " ".join(said) if isinstance(said, tuple) else said
    return wanted | {"options": f"-c lock_timeout={lock_ms} {_SERVER_KEEPALIVES} {_PLANNER} {said}".rstrip()}


def begin(connection: Connection, *, write: bool) -> None:
    """Begin a transaction. A writer takes the writers' lock at once: two queue instead of failing half way."""
    if not write:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        return
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITERS_LOCK})")


def gather_statistics(connection: Connection) -> None:
    """Have the server count its rows anew, within the caller's transaction: it plans by what was there before.

    ``fp8tune show`` right after an import of a million rows took a minute without. The server skips the tables of
    another owner.
    """
    connection.exec_driver_sql("ANALYZE")


def moment(connection: Connection) -> str:
    """A text that each commit on the server changes."""
    return str(connection.exec_driver_sql("SELECT pg_current_snapshot()::text").scalar_one())
