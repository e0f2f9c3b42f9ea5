"""Opening a results database: URLs, SQLite's modes, a server's locks, and the driver's errors as one line each.

SQLite is written in WAL mode with ``synchronous=NORMAL``: a reader never waits for a sweep, a killed process loses
nothing that was committed, and a power cut at most the last trials. Closing goes back to one plain file. With a
rollback journal a commit takes 2 ms instead of 0.1, and a reader stops the sweep.

On PostgreSQL writers queue for one advisory lock. Each reader sees one moment.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from fp8tune.errors import DatabaseError
from fp8tune.redaction import passwords, redacted, without
from fp8tune.store import logs

BUSY_TIMEOUT_S = 30.0
"""How long to wait for another process's commit; the slowest seen with four writers took half a second."""

_BUSY_RETRY_S = 0.02

_DAMAGED = "is damaged (cut off or overwritten): restore it from git or a copy, or move it away and sweep again"
_FOREIGN = "is not a results database of this fp8tune: give another file with --db"
_LOCKED = "is locked by another process: wait for it to end, then run this again"
_SQLITE_LINES = {
    "file is not a database": "is not a database, or is damaged: restore it, or give another file with --db",
    "malformed": _DAMAGED,
    "could not decode": _DAMAGED,
    "locked": _LOCKED,
    "readonly": "cannot be written: make the file and its folder writable, or give another file with --db",
    "unable to open": "cannot be opened: check that its folder exists and may be written",
    "full": "could not grow, the disk is full: free some space; every row stored before is kept",
    "disk i/o": "could not be read or written (disk error): check the disk and ulimit -f, then run fp8tune doctor",
    "no such table": "is an SQLite file but not a results database: give another file with --db",
    "no such column": _FOREIGN,
}
_LOST = "was lost, the server ended the connection: run this again; every row stored before is kept"
_UNREACHABLE = "cannot be reached: check the host and the port, and that the server runs"
_POSTGRESQL_LINES = {
    "55p03": _LOCKED,
    "42p01": _FOREIGN,  # no such table
    "42703": _FOREIGN,  # no such column
    "42501": "may not be used by this user: ask the server's administrator for the right to",
    "25006": "cannot be written: ask the server's administrator for the right to, or give another one with --db",
    "53100": "could not grow, the server's disk is full: every row stored before is kept",
    "57p": _LOST,
    "08": _LOST,
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
_LINES = {"sqlite": _SQLITE_LINES, "postgresql": _POSTGRESQL_LINES}

TESTED = "tested are SQLite (a file) and PostgreSQL (postgresql://USER@HOST/NAME)"
"""What the tests run; nothing else is accepted."""

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
"""Scheme -> the dialect and driver that opens it."""

_CONNECT_TIMEOUT_S = 10
_WRITERS_LOCK = int.from_bytes(b"fp8tune")
"""The advisory lock that writers of one server database hold for the length of a transaction."""


class ForeignLogError(DatabaseError):
    """A log beside the file is another file's: SQLite would write its pages into this one."""


class EmptyDatabaseError(DatabaseError):
    """There is a database, and nothing in it yet."""


def connect(url: str, *, create: bool, writable: bool, patience_s: float = BUSY_TIMEOUT_S) -> Connection:
    """One connection to a plain path or a database URL. Raises DatabaseError for whatever stands in the way.

    ``patience_s``: how long it waits for another process's commit.
    """
    parsed = _parse(url)
    path = sqlite_path(parsed)
    options: dict[str, Any]
    if path is not None:
        _check_path(path, create=create and writable, writable=writable)
        parsed = _sqlite_url(path, create=create, writable=writable)
    if _is_sqlite(parsed):
        options = {"timeout": patience_s, "isolation_level": None}
    else:
        options = {"connect_timeout": _CONNECT_TIMEOUT_S, "application_name": "fp8tune"}
        options = {name: value for name, value in options.items() if name not in parsed.query}
    try:
        engine = create_engine(parsed, poolclass=NullPool, connect_args=options)
    except ImportError:
        raise DatabaseError(f"{label(url)} needs a driver: pip install 'fp8tune[postgresql]'") from None
    _map_errors(engine, label(url), passwords(url))
    connection = engine.connect()
    connection.info[_PATIENCE] = patience_s
    if path is not None:
        connection.info[_OPENED] = logs.Opened.at(path)
    if connection.dialect.name == "sqlite":
        _pragma(connection, "foreign_keys=ON")
    return connection


def label(url: str) -> str:
    """What messages call a database: its path, or its URL without the password."""
    path = path_of(url)
    return redacted(url) if path is None else str(path)


def begin_writing(connection: Connection) -> None:
    """Switch to WAL: only once the file is known to be ours, for the switch changes it."""
    if connection.dialect.name == "sqlite":
        _switch_to_wal(connection)
        _pragma(connection, "synchronous=NORMAL")


def private_copy(connection: Connection, label: str) -> Connection:
    """A temporary copy of an older SQLite file, which replaces the connection. Raises DatabaseError for a server's."""
    if connection.dialect.name != "sqlite":
        raise DatabaseError(
            f"{label} is of an older fp8tune: run fp8tune sweep or fp8tune import on it, which bring it up to date"
        )
    raw: Any = connection.connection.dbapi_connection
    copy = sqlite3.connect("", isolation_level=None)
    try:
        raw.backup(copy)
    except sqlite3.Error:
        raise DatabaseError(f"{label} {_DAMAGED}") from None
    close(connection, wrote=False)
    engine = create_engine("sqlite://", poolclass=NullPool, creator=lambda: copy)
    _map_errors(engine, label, ())
    return engine.connect()


def close(connection: Connection, *, wrote: bool) -> None:
    """Close; the last writer leaves one plain file. Raises DatabaseError if the file was replaced; saves the rows."""
    with contextlib.suppress(DatabaseError):  # of a connection that is lost already
        connection.rollback()
    is_ours = False
    try:
        if wrote:
            _check_still_there(connection)
            is_ours = connection.dialect.name == "sqlite"
    finally:
        left = ""
        if wrote and connection.dialect.name == "sqlite":
            raw: Any = connection.connection.dbapi_connection
            try:
                _leave_one_file(raw)
            except sqlite3.Error:
                left = _path_of(raw) if is_ours else ""
        connection.close()
        connection.engine.dispose()
        if left:  # a statement that a signal broke off keeps a connection from changing the mode; a new one has none
            _end_statements()
            with contextlib.suppress(sqlite3.Error):  # another process still has it open: that one will do it
                again = sqlite3.connect(f"file:{quote(left)}?mode=rw", isolation_level=None, uri=True)
                with contextlib.closing(again):
                    _leave_one_file(again)


def _end_statements() -> None:
    """End statements that a signal broke off: frames of its exception hold their cursors, and these the file's lock.

    Without it the log stayed beside the file in 2 of 60 imports that SIGTERM ended.
    """
    error = sys.exception()
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()


def _leave_one_file(raw: sqlite3.Connection) -> None:
    """Take the log in, and go back from WAL."""
    raw.execute("PRAGMA busy_timeout=0")
    raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw.execute("PRAGMA journal_mode=DELETE")


def _path_of(raw: sqlite3.Connection) -> str:
    """The file behind a connection; empty in memory."""
    with contextlib.suppress(sqlite3.Error):
        return str(raw.execute("PRAGMA database_list").fetchone()[2])
    return ""


@contextlib.contextmanager
def transaction(connection: Connection, *, write: bool = False) -> Iterator[Connection]:
    """One transaction. A writer takes the writers' lock at once: two queue instead of failing half way."""
    if write:
        _check_still_there(connection)
    with connection.begin():
        for statement in _BEGIN[connection.dialect.name, write]:
            connection.exec_driver_sql(statement.format(patience_s=connection.info.get(_PATIENCE)))
        yield connection


_BEGIN = {
    ("sqlite", False): ("BEGIN",),
    ("sqlite", True): ("BEGIN IMMEDIATE",),
    ("postgresql", False): ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",),
    ("postgresql", True): (
        "SET LOCAL lock_timeout = '{patience_s:g}s'",
        f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})",
    ),
}
"""(dialect, whether it writes) -> what begins a transaction."""

_OPENED = "fp8tune: the file that was opened"
_PATIENCE = "fp8tune: seconds to wait for another process's commit"


def _check_still_there(connection: Connection) -> None:
    """Raise DatabaseError where the path has become another file (``git checkout``): rows would go into nowhere."""
    opened: logs.Opened | None = connection.info.get(_OPENED)
    if opened is None or not opened.is_replaced():
        return
    del connection.info[_OPENED]  # said and saved once
    saved = logs.unused(opened.path, "saved")
    raw: Any = connection.connection.dbapi_connection
    what = f"{opened.path} was replaced or removed while it was in use (git checkout, pull or switch?)"
    try:
        raw.execute("VACUUM INTO ?", (str(saved),))
    except sqlite3.Error as error:
        raise DatabaseError(f"{what}, and its rows could not be saved ({error}): run this again") from None
    raise DatabaseError(f"{what}: every row stored before is in {saved}; run fp8tune import {saved}, then this again")


def sqlite_path(url: URL) -> Path | None:
    """The file of an SQLite URL; None for a server and for a database in memory."""
    if not _is_sqlite(url) or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def path_of(url: str) -> Path | None:
    """The file of a plain path or URL; None for a server and for a database in memory."""
    return sqlite_path(_parse(url))


def exists(url: str) -> bool:
    """Whether there is a database to open: a file that is there, or any server."""
    parsed = _parse(url)
    path = sqlite_path(parsed)
    return path.is_file() if path is not None else not _is_sqlite(parsed)


def _parse(url: str) -> URL:
    if "://" not in url:
        return URL.create("sqlite", database=url)
    scheme = url.split("://")[0]
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseError(f"{scheme}://... is no database URL: {TESTED}") from None
    if parsed.drivername not in _DRIVERS:
        raise DatabaseError(f"{scheme}://... cannot be used: {TESTED}")
    return parsed.set(drivername=_DRIVERS[parsed.drivername])


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _check_path(path: Path, *, create: bool, writable: bool) -> None:
    if path.is_dir():
        raise DatabaseError(f"{path} is a folder: give a file with --db")
    if not path.exists() and not create:
        raise DatabaseError(f"{path} does not exist: run fp8tune sweep or fp8tune import, or give another --db")
    if not path.exists() and not path.parent.is_dir():
        raise DatabaseError(f"{path} cannot be made, its folder does not exist: make the folder first")
    checked = path if path.exists() else path.parent
    if writable and not os.access(checked, os.W_OK):
        raise DatabaseError(f"{path} cannot be written: make {checked} writable, or give another file with --db")
    if path.exists() and not os.access(path, os.R_OK):
        raise DatabaseError(f"{path} cannot be read: ask its owner for the right to, or give another file with --db")
    if (log := logs.foreign(path)) is not None:
        raise ForeignLogError(
            f"{path} was replaced (git checkout, pull or switch?) while {log.name}, the log of a process that was "
            f"killed, lay beside it: run fp8tune doctor --repair --db {path}"
        )


def _sqlite_url(path: Path, *, create: bool, writable: bool) -> URL:
    query = {"uri": "true", "mode": ("rwc" if create else "rw") if writable else "ro"}
    if not writable and _is_stranded(path):
        query["immutable"] = "1"
    return URL.create("sqlite", database=f"file:{quote(os.fsencode(path.absolute()))}", query=query)


def _is_stranded(path: Path) -> bool:
    """Whether the file says WAL where SQLite may not make the files that WAL needs."""
    return not Path(f"{path}-wal").exists() and not os.access(path.parent, os.W_OK) and logs.says_wal(path)


def _switch_to_wal(connection: Connection) -> None:
    """Wait for whoever writes: SQLite itself refuses a change of mode then (2 of 32,000 opens by four processes)."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _pragma(connection, "journal_mode=WAL")
        except DatabaseError as error:
            cause = error.__context__
            code = cause.sqlite_errorcode if isinstance(cause, sqlite3.Error) else 0
            is_busy = code & 0xFF == sqlite3.SQLITE_BUSY  # the low byte: the code without its details
            if not is_busy or time.monotonic() >= deadline:
                raise
        time.sleep(_BUSY_RETRY_S)


def _pragma(connection: Connection, text: str) -> None:
    connection.exec_driver_sql(f"PRAGMA {text}")
    connection.rollback()  # ends what SQLAlchemy took for the beginning of a transaction


def _map_errors(engine: Engine, label: str, secrets: Collection[str]) -> None:
    """The one border where a driver's errors become ours."""

    @event.listens_for(engine, "handle_error")
    def to_database_error(context: ExceptionContext) -> None:
        original = context.original_exception
        if isinstance(original, DatabaseError):  # a column type refused a value
            raise original
        if not isinstance(original, Exception):  # Ctrl-C
            return
        state = getattr(original, "sqlstate", None)  # a server may speak another language than English
        text = (state or str(original)).lower()
        for part, line in _LINES[engine.dialect.name].items():
            if text.startswith(part) if state else part in text:
                raise DatabaseError(f"{label} {line}") from None
        first_line = (str(original).strip().splitlines() or [type(original).__name__])[0][:200]
        raise DatabaseError(f"{label} cannot be used: {without(secrets, first_line)}") from None
