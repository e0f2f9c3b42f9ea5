"""SQLite's part of a results database: what may stand in a file's way, its modes, and one plain file at the end.

A file is written in WAL mode with ``synchronous=NORMAL``: a reader never waits for a sweep, a killed process loses
nothing that was committed, and a power cut at most the last trials. Closing goes back to one plain file. With a
rollback journal a commit takes 2 ms instead of 0.1, and a reader stops the sweep.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection

from fp8tune.errors import DatabaseError
from fp8tune.store import logs, network_files, remembered

BUSY_TIMEOUT_S = 30.0
"""How long to wait for another process's commit; the slowest seen with four writers took half a second."""

_BUSY_RETRY_S = 0.02

DAMAGED = "is damaged (cut off or overwritten): restore it from git or a copy, or move it away and sweep again"
FOREIGN = "is not a results database of this fp8tune: give another file with --db"
LOCKED = "is locked by another process: wait for it to end, then run this again"
LINES = {
    "file is not a database": "is not a database, or is damaged: restore it, or give another file with --db",
    "malformed": DAMAGED,
    "could not decode": DAMAGED,
    "locked": LOCKED,
    "readonly": "cannot be written: make the file and its folder writable, or give another file with --db",
    "unable to open": "cannot be opened: check that its folder exists and may be written",
    "full": "could not grow, the disk is full: free some space; every row stored before is kept",
    "disk i/o": "could not be read or written (disk error): check the disk and ulimit -f, then run fp8tune doctor",
    "no such table": "is an SQLite file but not a results database: give another file with --db",
    "no such column": FOREIGN,
}

_OPENED = "fp8tune: the file that was opened"


class ForeignLogError(DatabaseError):
    """A log beside the file is another file's: SQLite would write its pages into this one."""


def check_path(path: Path, *, create: bool, writable: bool) -> None:
    """Raise DatabaseError for what stands in the way of opening a file."""
    if path.is_dir():
        raise DatabaseError(f"{path} is a folder: give a file with --db")
    if not path.exists() and not create:
        raise DatabaseError(f"{path} does not exist: run fp8tune sweep or fp8tune import, or give another --db")
    if not path.exists() and not path.parent.is_dir():
        raise DatabaseError(f"{path} cannot be made, its folder does not exist: make the folder first")
    _check_network(path, writable=writable)
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


def _check_network(path: Path, *, writable: bool) -> None:
    """A file that nobody writes to can be read anywhere, without locks; with a log it is written to, or was broken off.

    Raises DatabaseError.
    """
    if (type_ := network_files.type_of(path)) is None or network_files.is_allowed():
        return
    if writable:
        raise DatabaseError(
            f"{path} is on a network file system ({type_}), where SQLite loses rows: write into a local file with --db "
            f"and fp8tune import it, or use PostgreSQL; {network_files.VARIABLE}=1 allows one process at a time"
        )
    if path.exists() and (logs.says_wal(path) or logs.unmerged(path)):
        raise DatabaseError(
            f"{path} is on a network file system ({type_}) and was not closed: let its writer end, or copy it to a "
            "local disk with the files beside it"
        )


def connected(path: Path | None, *, create: bool, writable: bool, patience_s: float) -> sqlite3.Connection:
    """The driver's connection to a file, or in memory: never made unless ``create``, or written to unless ``writable``.

    Any thread may use it.
    """
    address = ":memory:"
    if path is not None:
        mode = ("rwc" if create else "rw") if writable else "ro"
        address = f"file:{quote(os.fsencode(path.absolute()))}?mode={mode}"
        if not writable and (_is_stranded(path) or network_files.type_of(path)):
            address += "&immutable=1"
    return sqlite3.connect(address, timeout=patience_s, isolation_level=None, uri=True, check_same_thread=False)


def _is_stranded(path: Path) -> bool:
    """Whether the file says WAL where SQLite may not make the files that WAL needs."""
    return not Path(f"{path}-wal").exists() and not os.access(path.parent, os.W_OK) and logs.says_wal(path)


def prepare(connection: Connection, path: Path | None) -> None:
    """What a new connection needs; ``path`` is None in memory."""
    if path is not None:
        remembered.of(connection)[_OPENED] = logs.Opened.at(path)
    pragma(connection, "foreign_keys=ON")


def begin_writing(connection: Connection) -> None:
    """Switch to WAL: only once the file is known to be ours, for the switch changes it."""
    _switch_to_wal(connection)
    pragma(connection, "synchronous=NORMAL")


def _switch_to_wal(connection: Connection) -> None:
    """Wait for whoever writes: SQLite itself refuses a change of mode then (2 of 32,000 opens by four processes)."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return pragma(connection, "journal_mode=WAL")
        except DatabaseError as error:
            cause = error.__context__
            code = cause.sqlite_errorcode if isinstance(cause, sqlite3.Error) else 0
            is_busy = code & 0xFF == sqlite3.SQLITE_BUSY  # the low byte: the code without its details
            if not is_busy or time.monotonic() >= deadline:
                raise
        time.sleep(_BUSY_RETRY_S)


def pragma(connection: Connection, text: str) -> None:
    """Set one, outside a transaction."""
    connection.exec_driver_sql(f"PRAGMA {text}")
    connection.rollback()  # ends what SQLAlchemy took for the beginning of a transaction


def check_still_there(connection: Connection) -> None:
    """Raise DatabaseError where the path has become another file (``git checkout``): rows would go into nowhere."""
    opened: logs.Opened | None = remembered.of(connection).get(_OPENED)
    if opened is None or not opened.is_replaced():
        return
    del remembered.of(connection)[_OPENED]  # said and saved once
    saved = logs.unused(opened.path, "saved")
    raw = _raw(connection)
    what = f"{opened.path} was replaced or removed while it was in use (git checkout, pull or switch?)"
    try:
        raw.execute("VACUUM INTO ?", (str(saved),))
    except sqlite3.Error as error:
        raise DatabaseError(f"{what}, and its rows could not be saved ({error}): run this again") from None
    raise DatabaseError(f"{what}: every row stored before is in {saved}; run fp8tune import {saved}, then this again")


def copied(connection: Connection, label: str) -> sqlite3.Connection:
    """A temporary copy of a file. Raises DatabaseError for a damaged one."""
    copy = sqlite3.connect("", isolation_level=None)
    try:
        _raw(connection).backup(copy)
    except sqlite3.Error:
        raise DatabaseError(f"{label} {DAMAGED}") from None
    return copy


def close(connection: Connection, *, wrote: bool) -> None:
    """Close; the last writer leaves one plain file. Raises DatabaseError if the file was replaced; saves the rows."""
    is_ours = False
    try:
        if wrote:
            check_still_there(connection)
            is_ours = True
    finally:
        left = ""
        if wrote:
            raw = _raw(connection)
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


def _raw(connection: Connection) -> sqlite3.Connection:
    raw: Any = connection.connection.dbapi_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw


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
