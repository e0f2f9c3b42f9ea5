"""Choice of the databases that a command takes without ``--db``: the user's own, and the shipped results."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.revisions import git
from fp8tune.store import database

VARIABLE = "FP8TUNE_DB"
"""The environment variable that names the user's own database: a path or a URL."""

BASE_VARIABLE = "FP8TUNE_BASE"
"""The environment variable that names other shipped results; if it is set and empty, there are none."""

LOCAL = "fp8tune.db"  # the user's own results, if it is in this folder
COMMITTED = "results.db"  # the shipped results in a checkout
INSTALLED = "_results.db"  # the same in a wheel, beside the package's modules


@dataclass(frozen=True)
class Databases:
    """Paths or URLs of the own and the shipped results."""

    own: str | None
    base: str | None = None

    @property
    def label(self) -> str:
        """Name in messages: ``fp8tune.db over results.db``. Without passwords."""
        return " over ".join(database.label(url) for url in (self.own, self.base) if url)


def is_in_memory(url: str) -> bool:
    """Return True for a database that is gone when the command ends."""
    return url in ("", ":memory:") or url.rstrip("/") == "sqlite:" or url.endswith("/:memory:")


def _checked(db: str) -> str:
    if is_in_memory(db):
        raise UsageError(f"--db {db!r} is a database in memory, gone when the command ends: give a file")
    return db


def own() -> str:
    """Return the user's own database, which may not exist: the variable's, ``./fp8tune.db``, or the data folder's.

    Raises:
        UsageError: The variable names a database in memory.
    """
    if named := os.environ.get(VARIABLE):
        if is_in_memory(named):
            raise UsageError(f"{VARIABLE}={named!r} is a database in memory, gone when the command ends: give a file")
        return named
    return LOCAL if os.path.lexists(LOCAL) else str(data_folder() / LOCAL)


def data_folder() -> Path:
    """Return the platform's folder for data of fp8tune: ``~/.local/share/fp8tune`` on Linux. It may not exist."""
    import platformdirs

    return Path(platformdirs.user_data_dir("fp8tune", appauthor=False))


def base() -> str | None:
    """Return the shipped results: ``results.db`` of this folder or the checkout, or those of the wheel."""
    if (named := os.environ.get(BASE_VARIABLE)) is not None:
        return named or None
    package = Path(__file__).resolve().parents[1]
    is_checkout = (package.parent / "sweeps").is_dir()
    candidates = [Path(COMMITTED)] if _is_ours(Path(COMMITTED)) else []
    candidates += [package.parent / COMMITTED] if is_checkout else []
    return next((str(path) for path in (*candidates, package / INSTALLED) if path.is_file()), None)


def to_read(db: str | None, notice: Callable[[str], None]) -> Databases:
    """Return what a command reads: ``--db`` alone, or the own and the shipped results.

    ``notice`` takes one line that says which they are, unless they were named.
    """
    if db is not None:
        return Databases(_checked(db))
    mine, below = own(), base()
    if below is None or _is_same(mine, below):
        return Databases(mine)
    with contextlib.suppress(OSError):  # of a folder that may not be read
        if database.exists(mine):
            databases = Databases(mine, below)
            notice(f"rows are those of {databases.label}; --db reads one alone")
            return databases
    is_named = bool(os.environ.get(VARIABLE))
    missing = f"{database.label(mine)}, which {VARIABLE} names, is not there yet: " if is_named else ""
    notice(f"{missing}rows are those that come with fp8tune, {database.label(below)}")
    return Databases(None, below)


def to_write(db: str | None, notice: Callable[[str], None], *, create: bool = True) -> str:
    """Return what a command writes: ``--db``, or the user's own database. ``create``: make its folder.

    ``notice`` takes one line that says which database that is.

    Raises:
        UsageError: The variable names the shipped results, or a file that git tracks: the next pull would conflict.
        DatabaseError: No such database can be used, or the folder cannot be made.
    """
    if db is not None:
        database.parse(_checked(db))  # before a sweep is planned: a database that cannot be used is refused at once
        return db
    mine, below = own(), base()
    if below is not None and _is_same(mine, below):
        raise UsageError(f"{database.label(mine)} has the rows that come with fp8tune: write into it with --db {mine}")
    if create and mine == str(data_folder() / LOCAL):
        try:
            data_folder().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"{data_folder()} cannot be made ({error.strerror}): name a database with --db or {VARIABLE}"
            ) from None
    if (path := database.path_of(mine)) is not None and git.tracks(path):
        raise UsageError(f"git tracks {path}: write into it with --db {path}, or into another with --db PATH")
    notice(f"rows go into {database.label(mine)}" if create else f"the database is {database.label(mine)}")
    return mine


def _is_same(first: str, second: str) -> bool:
    paths = [database.path_of(url) for url in (first, second)]
    with contextlib.suppress(OSError):
        return all(paths) and os.path.samefile(*map(str, paths))
    return False


def _is_ours(path: Path) -> bool:
    """Return True for an SQLite file with our tables, or with unreadable ones: whoever opens it says so."""
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            return False
        with path.open("rb") as file:
            if file.read(15) != b"SQLite format 3":
                return False
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except OSError:
        return False
    except (sqlite3.Error, UnicodeDecodeError):
        return True
    return {"meta", "trials"} <= names
