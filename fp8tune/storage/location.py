"""Which databases a command takes that is not told: the user's own, and the rows that come with fp8tune below them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.options import is_in_memory
from fp8tune.revisions import git
from fp8tune.storage import database

VARIABLE = "FP8TUNE_DB"
"""The environment variable that names the user's own database: a path or a URL."""

BASE_VARIABLE = "FP8TUNE_BASE"
"""The environment variable that names another base; if it is set and empty, there is none."""

LOCAL = "fp8tune.db"
"""In this folder, if it is there: the user's own rows."""

COMMITTED = "results.db"
"""In a checkout: the rows that come with fp8tune."""

INSTALLED = "_results.db"
"""In a wheel, beside the package's modules: the same rows without their samples."""

_MAGIC = b"SQLite format 3\x00"


@dataclass(frozen=True)
class Databases:
    """What is read: the own rows, over those of a base. Paths or URLs."""

    own: str | None
    base: str | None = None

    @property
    def label(self) -> str:
        """What messages call it: ``fp8tune.db over results.db``. Without passwords."""
        return " over ".join(database.label(url) for url in (self.own, self.base) if url)


def own() -> str:
    """The user's own database, which may not be there yet: the variable's, ``./fp8tune.db``, or the data folder's.

    Raises UsageError for a variable that names a database in memory.
    """
    if named := os.environ.get(VARIABLE):
        if is_in_memory(named):
            raise UsageError(f"{VARIABLE}={named!r} is a database in memory, gone when the command ends: give a file")
        return named
    return LOCAL if os.path.lexists(LOCAL) else str(data_folder() / LOCAL)


def data_folder() -> Path:
    """Where the platform keeps a user's data of fp8tune: ``~/.local/share/fp8tune`` on Linux. May not be there."""
    import platformdirs

    return Path(platformdirs.user_data_dir("fp8tune", appauthor=False))


def base() -> str | None:
    """The rows that come with fp8tune: ``results.db`` of this folder or the checkout, or those of the wheel."""
    if (named := os.environ.get(BASE_VARIABLE)) is not None:
        return named or None
    if _is_ours(Path(COMMITTED)):
        return COMMITTED
    package = Path(__file__).resolve().parents[1]
    for path in (package.parent / COMMITTED, package / INSTALLED):
        if path.is_file() and (path.name == INSTALLED or (package.parent / "sweeps").is_dir()):
            return str(path)
    return None


def to_read(db: str | None, notice: Callable[[str], None]) -> Databases:
    """What a command reads: what ``--db`` names and nothing else, or the own rows over the base's.

    ``notice`` takes one line which they are, unless there are none but those that were named.
    """
    if db is not None:
        return Databases(db)
    mine, below = own(), base()
    if below is None or _is_same(mine, below):
        return Databases(mine)
    if not _is_there(mine, notice):
        missing = (
            f"{database.label(mine)}, which {VARIABLE} names, is not there yet: " if os.environ.get(VARIABLE) else ""
        )
        notice(f"{missing}rows are those that come with fp8tune, {database.label(below)}")
        return Databases(None, below)
    found = Databases(mine, below)
    notice(f"rows are those of {found.label}; --db reads one alone")
    return found


def to_write(db: str | None, notice: Callable[[str], None], *, create: bool = True) -> str:
    """What a command writes: what ``--db`` names, else the user's own database. ``create``: with its folder.

    ``notice`` takes one line which database that is. Raises UsageError where the variable names the base, and where git
    tracks it: the next pull would conflict. Raises DatabaseError where the folder cannot be made.
    """
    if db is not None:
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


def _is_there(url: str, notice: Callable[[str], None]) -> bool:
    try:
        return database.exists(url)
    except OSError as error:
        notice(f"left out {database.label(url)}, which cannot be read ({error.strerror})")
        return False


def _is_same(one: str, other: str) -> bool:
    paths = [database.path_of(url) for url in (one, other)]
    with contextlib.suppress(OSError):
        return all(paths) and os.path.samefile(*map(str, paths))
    return False


def _is_ours(path: Path) -> bool:
    """Whether a file that happens to be called so holds rows of fp8tune, or did before it was damaged."""
    try:
        if not path.is_file():  # to open a pipe waits for whoever writes it
            return False
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except OSError:
        return False
    except (sqlite3.Error, UnicodeDecodeError):
        return True  # damaged or locked: whoever opens it says so
    return {"meta", "trials"} <= names
