"""Opening a results database: its URL, its transactions, and the driver's errors as one line each.

What is SQLite's alone is in :mod:`fp8tune.store.sqlite`, what is a server's in :mod:`fp8tune.store.postgresql`.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Collection, Hashable, Iterator
from contextvars import ContextVar
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from fp8tune.errors import DatabaseError
from fp8tune.redaction import passwords, redacted, without
from fp8tune.store import last_writes, postgresql, remembered, retrying, sqlite

_LINES = {"sqlite": sqlite.LINES, "postgresql": postgresql.LINES}

TESTED = "tested are SQLite (a file) and PostgreSQL (postgresql://USER@HOST/NAME)"
"""What the tests run; nothing else is accepted."""

_LABEL, _SECRETS = "fp8tune_label", "fp8tune_secrets"
"""Options of an engine: what messages call the database, and what they must not say."""

_CONNECT: ContextVar[Callable[[], sqlite3.Connection]] = ContextVar("connects to the file that is opened now")

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
"""Scheme -> the dialect and driver that opens it."""


class EmptyDatabaseError(DatabaseError):
    """There is a database, and nothing in it yet."""


def connect(url: str, *, create: bool, writable: bool, patience_s: float | None = None) -> Connection:
    """One connection to a plain path or a database URL. Raises DatabaseError for whatever stands in the way.

    ``patience_s``: how long it waits for another process's commit, and for a server that went away.
    """
    parsed = _parse(url)
    if _is_sqlite(parsed):
        return _file(sqlite_path(parsed), label(url), create, writable, patience_s)
    patience_s = retrying.PATIENCE_S if patience_s is None else patience_s
    options = postgresql.options(parsed.query, patience_s)
    # of the engine itself, not of a copy: its first connection asks the server for its version before any copy is used
    known = {_LABEL: label(url), _SECRETS: passwords(url)}
    try:
        engine = create_engine(parsed, poolclass=NullPool, connect_args=options, execution_options=known)
    except ImportError:
        raise DatabaseError(f"{label(url)} needs a driver: pip install 'fp8tune[postgresql]'") from None
    _map_errors(engine)
    connection = _begun(engine)
    retrying.be_patient(connection, patience_s)
    return connection


def _file(path: Path | None, label: str, create: bool, writable: bool, patience_s: float | None) -> Connection:
    """A connection to an SQLite file, or in memory."""
    if path is not None:
        sqlite.check_path(path, create=create and writable, writable=writable)
    patience_s = sqlite.BUSY_TIMEOUT_S if patience_s is None else patience_s
    connection = _through_sqlite(
        functools.partial(sqlite.connected, path, create=create, writable=writable, patience_s=patience_s), label
    )
    retrying.be_patient(connection, patience_s)
    sqlite.prepare(connection, path)
    return connection


def _through_sqlite(connect: Callable[[], sqlite3.Connection], label: str) -> Connection:
    """A connection of SQLite's driver as one of SQLAlchemy."""
    engine = _every_file().execution_options(**{_LABEL: label})
    token = _CONNECT.set(connect)
    try:
        return _begun(engine)
    finally:
        _CONNECT.reset(token)


@functools.cache
def _every_file() -> Engine:
    """One for all files: it compiles each statement once a process, which is more than half of reading a small file."""
    engine = create_engine("sqlite://", poolclass=NullPool, creator=lambda: _CONNECT.get()(), query_cache_size=2000)
    _map_errors(engine)
    return engine


def _begun(engine: Engine) -> Connection:
    return remembered.begin(engine.connect())


def label(url: str) -> str:
    """What messages call a database: its path, or its URL without the password."""
    path = path_of(url)
    return redacted(url) if path is None else str(path)


def begin_writing(connection: Connection) -> None:
    """What whoever writes does once the database is known to be ours."""
    if connection.dialect.name == "sqlite":
        sqlite.begin_writing(connection)


def private_copy(connection: Connection, label: str) -> Connection:
    """A temporary copy of an older SQLite file, which replaces the connection. Raises DatabaseError for a server's."""
    if connection.dialect.name != "sqlite":
        raise DatabaseError(
            f"{label} is of an older fp8tune: run fp8tune sweep or fp8tune import on it, which bring it up to date"
        )
    copy = sqlite.copied(connection, label)
    close(connection, wrote=False)
    return _through_sqlite(lambda: copy, label)


def close(connection: Connection, *, wrote: bool) -> None:
    """Close. Raises DatabaseError if an SQLite file was replaced; saves its rows."""
    with contextlib.suppress(DatabaseError):  # of a connection that is lost already
        connection.rollback()
    if connection.dialect.name == "sqlite":
        sqlite.close(connection, wrote=wrote)
    else:
        connection.close()
        connection.engine.dispose()


@contextlib.contextmanager
def transaction(connection: Connection, *, write: bool = False) -> Iterator[Connection]:
    """One transaction. A writer takes the writers' lock at once: two queue instead of failing half way."""
    is_file = connection.dialect.name == "sqlite"
    if write and is_file:
        sqlite.check_still_there(connection)
    with connection.begin():
        if is_file:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
        elif write:
            last_writes.begin(connection)
        else:
            postgresql.begin(connection, write=False)
        yield connection


def moment(connection: Connection) -> Hashable:
    """What changes with each commit of another process, within the caller's transaction."""
    if connection.dialect.name == "sqlite":
        return int(connection.exec_driver_sql("PRAGMA data_version").scalar_one())
    return postgresql.moment(connection)


def note_many_new_rows(connection: Connection) -> None:
    """Tell a server that there are many, within the caller's transaction."""
    if connection.dialect.name != "sqlite":
        postgresql.gather_statistics(connection)


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


def _map_errors(engine: Engine) -> None:
    """The one border where a driver's errors become ours. Of which database they are, its connection's options say."""

    @event.listens_for(engine, "handle_error")
    def to_database_error(context: ExceptionContext) -> None:
        original = context.original_exception
        if isinstance(original, DatabaseError):  # a column type refused a value
            raise original
        if not isinstance(original, Exception):  # Ctrl-C
            if context.dialect.name == "sqlite":  # its connection is as good as before; a server may owe an answer
                context.is_disconnect = False
            return
        assert context.engine is not None
        options = context.engine.get_execution_options()
        label: str = options[_LABEL]
        secrets: Collection[str] = options.get(_SECRETS, ())
        state = getattr(original, "sqlstate", None)  # a server may speak another language than English
        text = (state or str(original)).lower()
        for part, line in _LINES[engine.dialect.name].items():
            # a code is no part of a message: "08" would be found in a port
            if text.startswith(part) if state else part in text and not part[0].isdigit():
                raise _error(context, label, line) from None
        if context.is_disconnect:
            raise postgresql.lost(label, context.connection) from None
        first_line = (str(original).strip().splitlines() or [type(original).__name__])[0][:200]
        raise _error(context, label, f"cannot be used: {without(secrets, first_line)}") from None


def _error(context: ExceptionContext, label: str, line: str) -> DatabaseError:
    is_server = context.dialect.name == "postgresql"
    return postgresql.error(label, line, context.connection) if is_server else DatabaseError(f"{label} {line}")
