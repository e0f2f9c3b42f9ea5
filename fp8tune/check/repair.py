"""The way back for an SQLite file beside which a process that was killed left its log.

The log of this very file is taken in. The log of another file, which ``git checkout`` has replaced since, is moved
away with a copy of the file that is there. Its rows come back if that copy, or one committed to git, fits it.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from fp8tune.check.finding import Finding, Level
from fp8tune.errors import DatabaseError, Fp8tuneError
from fp8tune.revisions import git
from fp8tune.store import database, logs
from fp8tune.store.results import Store
from fp8tune.sweep import picks

COMMITS = 50
"""Versions of the file in git that are tried, the newest first."""

_DEAD_MAN_SWITCH = 128  # the byte of ``-shm`` that each process locks that has the log open


def repair(db: str) -> list[Finding]:
    """Take in or set aside what was left beside a database, and say what was done.

    Raises DatabaseError where the log is in use or the database cannot be written.
    """
    path = database.path_of(db)
    if path is None:
        return [Finding(Level.OK, f"{database.label(db)}: a server needs no repair of its log"), *_decide(db)]
    if logs.foreign(path) is not None:
        return _part_from(path)
    if logs.unmerged(path) is None:
        return [Finding(Level.OK, f"{path}: no log was left beside it"), *_decide(db)]
    Store.open(db).close()
    if logs.unmerged(path) is not None:
        return [Finding(Level.WARNING, f"{path}: another process is writing to it", "let it end, then run this again")]
    return [Finding(Level.OK, f"{path}: the rows of the log beside it are in it now")]


def _decide(db: str) -> list[Finding]:
    """Decide picks anew that are not those of the rows."""
    with Store.open(db, writable=False) as store:
        if picks.are_current(store):
            return []
    with Store.open(db) as store:
        picks.refresh_picks(store)
    return [Finding(Level.OK, f"{database.label(db)}: its picks were decided anew")]


def _part_from(path: Path) -> list[Finding]:
    left = logs.beside(path)
    if any(_is_in_use(log) for log in left if log.name.endswith("-shm")):
        raise DatabaseError(f"{path} was replaced while a process writes to it: let that end, then run this again")
    folder = logs.unused(path, "left-behind")
    try:
        folder.mkdir()
        shutil.copy2(path, folder)
        for log in left:
            log.rename(folder / log.name)
    except OSError as error:
        raise DatabaseError(f"{folder} cannot be made ({error.strerror}): make its folder writable") from None
    findings = [Finding(Level.OK, f"the log that is not of {path} was moved to {folder}, with a copy of {path.name}")]
    with tempfile.TemporaryDirectory(prefix="fp8tune-repair-") as scratch:
        found = _put_together(_bases(path), folder, Path(scratch) / path.name)
        if found is None:
            what = "the log's rows fit neither the file nor one that was committed to git"
            return [*findings, Finding(Level.WARNING, what, "run the same sweep again: it measures what is missing")]
        with Store.open(str(path)) as store, Store.open(str(found), writable=False) as other:
            added, _ = store.merge(other)
    return [*findings, Finding(Level.OK, f"{added} rows of the log were put back into {path}")]


def _bases(path: Path) -> Iterator[bytes]:
    """What the log may have been written for: the file that is there, then what was committed."""
    yield path.read_bytes()
    with contextlib.suppress(Fp8tuneError):  # no git, or no repository
        yield from git.versions(path, COMMITS)


def _put_together(bases: Iterable[bytes], folder: Path, trial: Path) -> Path | None:
    """The first of these files that is a sound database with the log applied to it."""
    for base in bases:
        for old in (trial, *logs.beside(trial)):
            old.unlink(missing_ok=True)
        trial.write_bytes(base)
        for log in folder.iterdir():
            if log.name != trial.name and not log.name.endswith("-shm"):  # SQLite makes the index anew
                shutil.copy2(log, trial.with_name(log.name))
        if _is_sound(trial):
            return trial
    return None


def _is_sound(path: Path) -> bool:
    """Whether SQLite finds nothing wrong, and every row can be read."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            sound = connection.execute("PRAGMA integrity_check(1)").fetchall() == [("ok",)]
            sound = sound and not connection.execute("PRAGMA foreign_key_check").fetchall()
            connection.execute("PRAGMA journal_mode=DELETE")
        if not sound:
            return False
        with Store.open(str(path), writable=False) as store:
            return all(True for _ in store.rows())
    except (sqlite3.Error, Fp8tuneError):
        return False


def _is_in_use(shared_memory: Path) -> bool:
    with shared_memory.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _DEAD_MAN_SWITCH)
        except OSError:
            return True
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _DEAD_MAN_SWITCH)
    return False
