"""Connections to a results database: transactions that are repeated when a server goes away, one-line errors."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import logging
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar, cast
from urllib.parse import quote

import tenacity
from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    create_engine,
    create_mock_engine,
    inspect,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.schema import ExecutableDDLElement
from sqlalchemy.util import LRUCache

from fp8tune.errors import DatabaseError
from fp8tune.redaction import passwords, redacted, without
from fp8tune.store.schema import METADATA, MIGRATIONS, VERSION, Meta

BUSY_S = 60.0
"""Patience with another process that holds the lock of a file."""

PATIENCE_S = 300.0
"""Patience with a server that went away: one that is restarted or upgraded is back by then."""

WRITERS_LOCK = int.from_bytes(b"fp8tune")
"""Advisory lock that the writers of one database on a server take in turn."""

IDLE_S = 20
"""A server ends a transaction whose client says nothing for so long: a paused process holds the lock no longer."""

TESTED = "tested are SQLite (a file) and PostgreSQL (postgresql://USER@HOST/NAME)"

_DRIVERS = {"sqlite": "sqlite", "sqlite+pysqlite": "sqlite"}
_DRIVERS |= dict.fromkeys(("postgresql", "postgresql+psycopg"), "postgresql+psycopg")

_OPTIONS = (
    f"-c lock_timeout=10000 -c idle_in_transaction_session_timeout={1000 * IDLE_S} -c jit=off"
    " -c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
    " -c work_mem=64MB -c random_page_cost=1.1"
)
# A host that is gone is noticed within 25 s, on both sides: the defaults of Linux take two hours.
_CONNECT = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}

_DAMAGED = "is damaged (cut off or overwritten): restore it from git or a copy, or move it away and sweep again"
_FOREIGN = "is not a results database of this fp8tune: give another file with --db"
_LOST = "was lost, the server ended the connection: run this again; every row stored before is kept"
_STARTING = "takes no connection now (it starts, stops or is full): run this again in a minute"
_UNREACHABLE = "cannot be reached: check the host and the port, and that the server runs"
_READ_ONLY = "cannot be written: get the right to write it (a file's folder, too), or give another one with --db"

# Pattern in "PostgreSQL's code, space, text of the error" -> line. The first that fits counts.
_LINES = {
    "^23|constraint|cannot store": "cannot hold this row, which is invalid and was not stored: see its values",
    "^42p01|^42703|no such (table|column)": _FOREIGN,
    "^42501|^25006|readonly": _READ_ONLY,
    "^53100|is full": "could not grow, the disk is full: free some space; every row stored before is kept",
    "^57p04": "was removed while it was in use: make the database with createdb",
    "^57p03|^53300": _STARTING,
    # A lock held longer than usual, a shutdown, IDLE_S, a lost connection, and what a server undoes by itself.
    "^55p03|^57p|^25p03|^08|^40": _LOST,
    "^[0-9a-z]{5} ": "",
    "starting up|shutting down|recovery mode|not yet accepting|too many|connection slots": _STARTING,
    "password": "refused the login: put the password into PGPASSWORD or ~/.pgpass, and check the user's name",
    "does not exist": "is not there: make the database with createdb, and check the user's name",
    "server closed|connection is": _LOST,
    "connection failed|connection timeout|resolve host": _UNREACHABLE,
    "file is not a database": "is not a database, or is damaged: restore it, or give another file with --db",
    "malformed|could not decode": _DAMAGED,
    "locked": "is locked by another process: stop it or wait for it, or give another file with --db",
    "unable to open": "cannot be opened: make its folder, and see that both may be read and written",
    "disk i/o": "could not be read or written (disk error): check the disk and ulimit -f, then run fp8tune doctor",
}

_logger = logging.getLogger("fp8tune")
_reached: set[str] = set()
"""Labels of databases that answered this process once."""
_open_files: Counter[tuple[int, int] | None] = Counter()
"""Number of databases that this process has open, by file."""
_opening = threading.RLock()
_compiled: LRUCache[Any, Any] = LRUCache(500)
"""SQL of the newest statements to files: each engine would compose its own, which takes longer than to run it."""

Value = TypeVar("Value")
Method = TypeVar("Method", bound=Callable[..., Any])


class EmptyDatabaseError(DatabaseError):
    """The database has no tables yet."""


class ForeignLogError(DatabaseError):
    """A log beside the file belongs to another file: SQLite would write its pages into this one."""


class LostConnectionError(DatabaseError):
    """The server went away, or does not take connections yet. Nothing of the transaction may be stored."""

    def __init__(self, label: str, line: str) -> None:
        super().__init__(f"{label} {line}")
        self.is_starting = line == _STARTING


class Database:
    """An SQLite file, or a database on a PostgreSQL server. A context manager; one thread at a time."""

    def __init__(self, url: str, *, create: bool = False, writable: bool = True) -> None:
        """Prepare connections; :meth:`open` makes the first one."""
        parsed = parse(url)
        self.url, self.label, self.path, self.writable, self.version = url, label(url), path_of(url), writable, VERSION
        self.is_server = parsed.get_backend_name() != "sqlite"
        self._secrets, self._is_ours = passwords(url), False
        self._inode: tuple[int, int] | None = None
        self._file: tuple[int, int] | None = None
        self._open: Connection | None = None
        self._known: dict[str, dict[tuple[object, ...], int]] = {}
        """Ids of rows that this transaction named already, by table."""
        self._mode = "ro" if not writable else "rwc" if create else "rw"
        self._engine = self._server(parsed) if self.is_server else self._sqlite()

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = False,
        writable: bool = True,
        versions: tuple[int, ...] = (VERSION,),
    ) -> Self:
        """Open a plain path or a database URL. Tables of an older version are brought up to date first.

        Args:
            url: The database.
            create: Make a missing file, and the tables of an empty database.
            writable: False needs no right to write.
            versions: Versions of the schema that the caller can read.

        Raises:
            DatabaseError: The database cannot be used.
        """
        database = cls(url, create=create, writable=writable)
        may_create = create and writable

        def is_passing(error: LostConnectionError) -> bool:
            return error.is_starting or database.label in _reached

        with _opening if database.path else contextlib.nullcontext():
            if database.path is not None:
                _check_path(database.path, create=may_create)
            try:
                _repeated(lambda: database._check_tables(versions, create=may_create), database.label, is_passing)
                if database.version not in versions:
                    database._engine.dispose()
                    with cls.open(url, versions=(*MIGRATIONS, VERSION)) as older:
                        older.run(older._migrate, write=True)
                    database.version = VERSION
            except BaseException:
                database._engine.dispose()
                raise
            _reached.add(database.label)
            database._is_ours = True
            if database.path is not None:
                database._engine.dispose()  # connections from now on use a write-ahead log
                database._inode = database._file = _inode(database.path)
                _open_files[database._file] += 1
        return database

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; the last writer of a file leaves one plain file without a log."""
        self._engine.dispose()
        if self.path is None:
            return
        if self.writable and _inode(self.path) == self._inode:
            with contextlib.suppress(sqlite3.Error):  # another process has it open, and will do it
                raw = sqlite3.connect(f"{_uri(self.path)}?mode=rw", uri=True, isolation_level=None, timeout=0)
                with contextlib.closing(raw):
                    raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    raw.execute("PRAGMA journal_mode=DELETE")
        _open_files[self._file] -= 1

    @property
    def _connection(self) -> Connection:
        assert self._open is not None, "outside of a transaction"
        return self._open

    def run(self, work: Callable[[], Value], *, write: bool = False) -> Value:
        """Return the result of ``work`` in a transaction, repeated until it is committed.

        All writes are idempotent, so a commit whose answer was lost may be repeated.

        Raises:
            LostConnectionError: The server did not come back in time.
        """
        if self._open is not None:  # within another transaction
            return work()

        def attempt() -> Value:
            had_collector = gc.isenabled()
            self._known.clear()
            gc.disable()  # records hold no cycles, and walking them again and again doubles the time
            try:
                with self.transaction(write=write) as self._open:
                    return work()
            finally:
                self._open = None
                if had_collector:
                    gc.enable()

        return _repeated(attempt, self.label)

    @contextlib.contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[Connection]:
        """Open a transaction that sees one state; a writing one is committed as a whole, or not at all."""
        if write and not self.writable:
            raise DatabaseError("the database was opened for reading only: open it with writable=True")
        with self._one_line_errors():
            if write and self.path is not None and self._is_ours:
                self._check_still_there(self.path)
            with self._engine.connect() as connection, connection.begin():
                if not self.is_server:
                    # IMMEDIATE takes the lock up front: who reads first and then writes would fail, not wait.
                    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
                elif write:
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITERS_LOCK})")
                else:
                    connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                yield connection

    def execute_alone(self, statement: str) -> None:
        """Execute VACUUM or ANALYZE outside of a transaction. A server vacuums by itself."""
        if not (self.is_server and statement == "VACUUM"):
            with self._one_line_errors(), self._engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(statement)

    def _sqlite(self) -> Engine:
        engine = create_engine("sqlite://", creator=self._connect, execution_options={"compiled_cache": _compiled})
        engine.dialect = _dialect()
        return engine

    def _server(self, url: URL) -> Engine:
        options: dict[str, Any] = {name: value for name, value in _CONNECT.items() if name not in url.query}
        named = url.query.get("options", "")
        options["options"] = f"{_OPTIONS} {named if isinstance(named, str) else ' '.join(named)}"
        options["application_name"] = "fp8tune"
        try:
            return create_engine(url, connect_args=options, pool_size=1, max_overflow=2)
        except ImportError:
            raise DatabaseError(f"{self.label} needs a driver: pip install 'fp8tune[postgresql]'") from None

    def _connect(self) -> sqlite3.Connection:
        address = ":memory:" if self.path is None else f"{_uri(self.path)}?mode={self._mode}"
        raw = sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        raw.execute("PRAGMA trusted_schema=OFF")
        raw.execute("PRAGMA foreign_keys=ON")
        if self._is_ours and self.writable and self.path is not None:
            deadline, is_wal = time.monotonic() + BUSY_S, False
            while not is_wal:  # wait for whoever writes: SQLite itself refuses a change of mode at once
                try:
                    is_wal = bool(raw.execute("PRAGMA journal_mode=WAL"))
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                        raise
                    time.sleep(0.02)
            # In WAL mode, NORMAL survives kill -9; only a power failure can lose the last commits.
            raw.execute("PRAGMA synchronous=NORMAL")
        return raw

    def _check_tables(self, versions: tuple[int, ...], *, create: bool) -> None:
        """Make missing tables, and read the version. Raises DatabaseError for one that cannot be read or migrated."""
        with self.transaction(write=create) as connection:
            inspector = inspect(connection)
            tables, fakes = set(inspector.get_table_names()), set(inspector.get_view_names())
            if not self.is_server:  # virtual tables and triggers run what the file says
                query = "SELECT tbl_name FROM sqlite_master WHERE type = 'trigger' OR sql LIKE 'create virtual%'"
                fakes |= set(connection.exec_driver_sql(query).scalars())
            if fakes := fakes & set(METADATA.tables):
                raise DatabaseError(f"{self.label}: {min(fakes)} is not a plain table there: give another file")
            if not tables and create:
                if self.is_server:
                    METADATA.create_all(connection)
                for definition in () if self.is_server else _definitions():
                    connection.exec_driver_sql(definition)
                connection.execute(Meta.insert().values(name="schema_version", value=str(VERSION)))
                return
            if not tables:
                raise EmptyDatabaseError(f"{self.label} is empty: run fp8tune sweep or fp8tune db import to fill it")
            if not {"meta", "trials"} <= tables:
                raise DatabaseError(f"{self.label} {_FOREIGN}")
            text = str(connection.scalar(_SCHEMA_VERSION))
        self.version = int(text) if text.isdecimal() else 0
        if "studies" in tables and self.version in {*versions, *MIGRATIONS}:
            return
        line = "was written by a development version that this fp8tune cannot read: move it away, and sweep again"
        if self.version > VERSION:
            line = f"was written by a newer fp8tune (schema {text}, this one: {VERSION}): pip install -U fp8tune"
        elif self.version and "studies" in tables:  # all trials, as a release has them
            line = "is an archive: read it with fp8tune db import, into another database"
        raise DatabaseError(f"{self.label} {line}")

    def _migrate(self) -> None:
        """Bring the tables up to date, unless another process did so in the meantime."""
        while (version := int(self._connection.scalar(_SCHEMA_VERSION) or VERSION)) in MIGRATIONS:
            MIGRATIONS[version](self._connection)
            new = update(Meta).where(Meta.c.name == "schema_version").values(value=str(version + 1))
            self._connection.execute(new)

    def _check_still_there(self, path: Path) -> None:
        """Raise DatabaseError if the path has become another file: rows would go nowhere."""
        if self._inode in (None, _inode(path)):
            return
        self._inode = None  # saved once
        names = (path.with_name(f"{path.name}.saved{number}") for number in itertools.count(1))
        saved = next(path for path in names if not path.exists())
        with self._engine.connect() as connection:
            cursor: Any = connection.connection.driver_connection
            cursor.execute("VACUUM INTO ?", (str(saved),))
        raise DatabaseError(
            f"{path} was replaced or removed while it was in use (git checkout, pull or switch?): "
            f"every row stored before is in {saved}; run fp8tune db import {saved}, then this again"
        )

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, sqlite3.Error) as error:
            cause = getattr(error, "orig", None) or error
            text = str(cause).strip()
            place = f"{getattr(cause, 'sqlstate', None) or ''} {text}".lower()
            line = next((line for pattern, line in _LINES.items() if re.search(pattern, place)), "")
            if getattr(error, "connection_invalidated", False) and not line:
                line = _LOST
            if line in (_LOST, _STARTING, _UNREACHABLE):
                raise LostConnectionError(self.label, line) from error
            first_line = without(self._secrets, (text.splitlines() or [type(cause).__name__])[0][:200])
            raise DatabaseError(f"{self.label} {line or f'cannot be used: {first_line}'}") from error
        except UnicodeDecodeError as error:  # of a text, or of SQLite's own words on a damaged schema
            raise DatabaseError(f"{self.label} {_DAMAGED}") from error


@functools.cache
def _dialect() -> Dialect:
    """Return SQLite's, one for all files: SQL is found again by statement and dialect."""
    engine = create_engine("sqlite://")
    engine.connect().close()  # asks for the version
    return engine.dialect


@functools.cache
def _definitions() -> list[str]:
    """Return the statements that make all tables in an empty file: to compose them takes longer than to run them."""
    statements = list[str]()

    def compose(item: ExecutableDDLElement, *_: object) -> None:
        statements.append(str(item.compile(dialect=_dialect())))

    METADATA.create_all(create_mock_engine("sqlite://", compose), checkfirst=False)
    return statements


_SCHEMA_VERSION = select(Meta.c.value).where(Meta.c.name == "schema_version")


def reads(method: Method) -> Method:
    """Make a method read in one transaction, which sees one state of the database."""
    return _within(method, write=False)


def writes(method: Method) -> Method:
    """Make a method write in one transaction, all or nothing."""
    return _within(method, write=True)


def _within(method: Method, *, write: bool) -> Method:
    @functools.wraps(method)
    def call(self: Database, *args: Any, **options: Any) -> Any:
        # A generator could be read once only, and the transaction may be repeated.
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        return self.run(lambda: method(self, *args, **options), write=write)

    return cast("Method", call)


def _repeated(
    work: Callable[[], Value], label: str, is_passing: Callable[[LostConnectionError], bool] = lambda error: True
) -> Value:
    """Repeat ``work`` while a server is away, for PATIENCE_S; announce a wait of more than a second, and its end."""
    began, is_announced = time.monotonic(), False

    def before_sleep(state: tenacity.RetryCallState) -> None:
        nonlocal is_announced
        if not is_announced and time.monotonic() - began >= 1.0:
            is_announced = True
            _logger.warning(f"{label} does not answer: waiting up to {PATIENCE_S / 60:.3g} min")

    value = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, LostConnectionError) and is_passing(e)),
        stop=tenacity.stop_before_delay(PATIENCE_S),
        # Many workers have lost the same server: they come back one by one.
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=5.0),
        before_sleep=before_sleep,
        reraise=True,
    )(work)
    if is_announced:
        _logger.warning(f"{label}: the connection is back after {time.monotonic() - began:.0f} s")
    return value


def insert_ignoring(connection: Connection, table: Any) -> Any:
    """Return an INSERT that skips rows whose key exists."""
    # Imported here, because the dialect of PostgreSQL is slow to import.
    dialect = importlib.import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
    return dialect.insert(table).on_conflict_do_nothing()


def label(url: str) -> str:
    """Return the name of a database in messages: its path, or its URL without the password."""
    return redacted(url) if (path := path_of(url)) is None else str(path)


def path_of(url: str) -> Path | None:
    """Return the file of a plain path or URL; None for a server and for a database in memory."""
    parsed = parse(url)
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:")
    return Path(str(parsed.database)) if is_file else None


def is_in_memory(url: str) -> bool:
    """Return True for a database that is gone when the process ends."""
    return parse(url).get_backend_name() == "sqlite" and path_of(url) is None


def exists(url: str) -> bool:
    """Return True if there is a database to open: a file that is there, or any server."""
    path = path_of(url)
    return path.is_file() if path is not None else not is_in_memory(url)


def parse(url: str) -> URL:
    """Parse a plain path or a URL.

    Raises:
        DatabaseError: No such database can be used.
    """
    if "://" not in url:
        return URL.create("sqlite", database=url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseError(f"{url.split('://')[0]}://... is no database URL: {TESTED}") from None
    if parsed.drivername not in _DRIVERS:
        raise DatabaseError(f"{url.split('://')[0]}://... cannot be used: {TESTED}")
    return parsed.set(drivername=_DRIVERS[parsed.drivername])


def _check_path(path: Path, *, create: bool) -> None:
    if path.is_dir():
        raise DatabaseError(f"{path} is a folder: give a file with --db")
    if not path.exists() and not create:
        raise DatabaseError(f"{path} does not exist: create it with fp8tune sweep --db {path}, or leave out --db")
    log = Path(f"{path}-wal")
    # Only a file whose header says WAL has a log with pages. Looked at again: another process may just open it.
    if all(_is_plain(path) and log.is_file() and log.stat().st_size > 32 for _ in range(3)):
        raise ForeignLogError(
            f"{path} was replaced (git checkout, pull or switch?) while {log.name}, the log of a process that was "
            f"killed, lay beside it: move {log.name} away, then run this again"
        )


def _is_plain(path: Path) -> bool:
    """Return True if the header is known to say that the file has no write-ahead log."""
    # Closing any descriptor of a file drops all locks of this process on it, those of SQLite's connections too: other
    # processes would then write, or remove the log, while these are in use.
    if _open_files[_inode(path)]:
        return False
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(19)[18:] == b"\1"
    return False


def _inode(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _uri(path: Path) -> str:
    return f"file:{quote(os.fsencode(path.absolute()))}"
