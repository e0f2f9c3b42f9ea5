"""Opening a results database: URLs, SQLite's modes, and the driver's errors as one line each.

SQLite is written in WAL mode, so that a reader never waits for a sweep, with ``synchronous=NORMAL``: a killed
process loses nothing that was committed, a power cut may lose the last trials but never the file. Closing goes back
to one plain file, which can be committed and can be read where nothing may be written.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from fp8tune.errors import DatabaseError

BUSY_TIMEOUT_S = 30.0
"""How long to wait for another process's commit; the slowest seen with four writers took half a second."""

_BUSY_RETRY_S = 0.02

_HEADER_BYTES = 20
_WRITE_VERSION_BYTE = 18  # of SQLite's file header: 2 says WAL
_WAL = 2

_DAMAGED = "is damaged (cut off or overwritten): restore it from git or a copy, or move it away and sweep again"
_SQLITE_LINES = {
    "file is not a database": "is not a database, or is damaged: restore it, or give another file with --db",
    "malformed": _DAMAGED,
    "could not decode": _DAMAGED,
    "locked": "is locked by another process: wait for it to end, then run this again",
    "readonly": "cannot be written: make the file and its folder writable, or give another file with --db",
    "unable to open": "cannot be opened: check that its folder exists and may be written",
    "full": "could not grow, the disk is full: free some space; every row stored before is kept",
    "disk i/o": "could not be read or written (disk error): check the disk and ulimit -f, then run fp8tune doctor",
    "no such table": "is an SQLite file but not a results database: give another file with --db",
    "no such column": "is not a results database of this fp8tune: give another file with --db",
}


def connect(url: str, *, create: bool, writable: bool) -> Connection:
    """One connection to a plain path or SQLAlchemy URL. Raises DatabaseError for whatever stands in the way."""
    parsed = _parse(url)
    path = sqlite_path(parsed)
    label = str(path) if path is not None else parsed.render_as_string(hide_password=True)
    if path is not None:
        _check_path(path, create=create and writable, writable=writable)
        parsed = _sqlite_url(path, create=create, writable=writable)
    try:
        options = {"timeout": BUSY_TIMEOUT_S, "isolation_level": None} if _is_sqlite(parsed) else {}
        engine = create_engine(parsed, poolclass=NullPool, connect_args=options)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise DatabaseError(
            f"{label} cannot be used: {_first_line(error)}; install its driver or give a file"
        ) from None
    _map_errors(engine, label)
    connection = engine.connect()
    if connection.dialect.name == "sqlite":
        _pragma(connection, "foreign_keys=ON")
    return connection


def begin_writing(connection: Connection) -> None:
    """Switch to WAL: only once the file is known to be ours, for the switch changes it."""
    if connection.dialect.name == "sqlite":
        _switch_to_wal(connection)
        _pragma(connection, "synchronous=NORMAL")


def close(connection: Connection, *, wrote: bool) -> None:
    """Close, and leave one plain file behind where this was the last writer."""
    connection.rollback()
    if wrote and connection.dialect.name == "sqlite":
        raw: Any = connection.connection.dbapi_connection
        with contextlib.suppress(sqlite3.Error):  # another process still has it open: that one will do it
            raw.execute("PRAGMA busy_timeout=0")
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            raw.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    connection.engine.dispose()


@contextlib.contextmanager
def transaction(connection: Connection, *, write: bool = False) -> Iterator[Connection]:
    """One transaction. A writer takes SQLite's lock at once, so that two of them queue instead of failing half way."""
    with connection.begin():
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
        yield connection


def sqlite_path(url: URL) -> Path | None:
    """The file of an SQLite URL; None for a server and for a database in memory."""
    if not _is_sqlite(url) or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def exists(url: str) -> bool:
    """Whether there is a database to open: a file that is there, or any server."""
    parsed = _parse(url)
    path = sqlite_path(parsed)
    return path.is_file() if path is not None else not _is_sqlite(parsed)


def _parse(url: str) -> URL:
    if "://" not in url:
        return URL.create("sqlite", database=url)
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseError(
            f"{url.split('://')[0]}://... is no database URL: give a file or an SQLAlchemy URL"
        ) from None


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


def _sqlite_url(path: Path, *, create: bool, writable: bool) -> URL:
    query = {"uri": "true", "mode": ("rwc" if create else "rw") if writable else "ro"}
    if not writable and _is_stranded(path):
        query["immutable"] = "1"
    return URL.create("sqlite", database=f"file:{quote(os.fsencode(path.absolute()))}", query=query)


def _is_stranded(path: Path) -> bool:
    """Whether the file says WAL where SQLite may not make the files that WAL needs."""
    if Path(f"{path}-wal").exists() or os.access(path.parent, os.W_OK):
        return False
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    return len(header) == _HEADER_BYTES and header[_WRITE_VERSION_BYTE] == _WAL


def _switch_to_wal(connection: Connection) -> None:
    """Wait for whoever writes, as everywhere else: SQLite itself refuses a change of mode then, at once.

    Two of 32,000 opens met that, with four processes at it on two loaded cores (Python 3.11).
    """
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


def _map_errors(engine: Engine, label: str) -> None:
    """The one border where a driver's errors become ours."""

    @event.listens_for(engine, "handle_error")
    def to_database_error(context: ExceptionContext) -> None:
        original = context.original_exception
        if isinstance(original, DatabaseError):  # a column type refused a value
            raise original
        if not isinstance(original, Exception):  # Ctrl-C
            return
        text = str(original).lower()
        for part, line in _SQLITE_LINES.items():
            if part in text:
                raise DatabaseError(f"{label} {line}") from None
        raise DatabaseError(f"{label} cannot be used: {_first_line(original)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
