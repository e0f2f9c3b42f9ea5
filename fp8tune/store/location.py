"""Databases of a command: ``--db``, else ``$FP8TUNE_DB``, else ``./fp8tune.db``; reading adds the shipped results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.revisions import git
from fp8tune.store import database

VARIABLE = "FP8TUNE_DB"
"""The environment variable that names the user's own database: a path or a URL."""

BASE_VARIABLE = "FP8TUNE_BASE"
"""The environment variable that names other shipped results; if it is set and empty, there are none."""

LOCAL = "fp8tune.db"  # the user's own results
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


def own() -> str:
    """Return the user's own database, which may not exist.

    Raises:
        UsageError: The variable names a database in memory.
    """
    url = os.environ.get(VARIABLE) or LOCAL
    if database.is_in_memory(url):
        raise UsageError(f"{VARIABLE}={url!r} is a database in memory, gone when the command ends: give a file")
    return url


def base() -> str | None:
    """Return the results that come with fp8tune: ``results.db`` of the checkout, or those of the wheel."""
    if (named := os.environ.get(BASE_VARIABLE)) is not None:
        return named or None
    package = Path(__file__).resolve().parents[1]
    is_checkout = (package.parent / "sweeps").is_dir()
    path = package.parent / COMMITTED if is_checkout else package / INSTALLED
    return str(path) if path.is_file() else None


def to_read(db: str | None, notice: Callable[[str], None]) -> Databases:
    """Return what a command reads: ``--db`` alone, or the own and the shipped results.

    ``notice`` takes one line about an own database that is named and not there.
    """
    mine, below = db or own(), None if db else base()
    if below is None or _is_same(mine, below):
        return Databases(mine)
    with contextlib.suppress(OSError):  # of a folder that may not be read
        if database.exists(mine):
            return Databases(mine, below)
    if os.environ.get(VARIABLE):
        label = database.label(mine)
        notice(f"{label}, which {VARIABLE} names, is not there yet: only {database.label(below)} is read")
    return Databases(None, below)


def to_write(db: str | None) -> str:
    """Return what a command writes: ``--db``, or the user's own database.

    Raises:
        UsageError: The own database is the shipped one, or a file that git tracks: the next pull would conflict.
        DatabaseError: No such database can be used.
    """
    if db is not None:
        database.parse(db)  # before a sweep is planned: a database that cannot be used is refused at once
        return db
    mine, below = own(), base()
    if below is not None and _is_same(mine, below):
        raise UsageError(f"{database.label(mine)} has the rows that come with fp8tune: write into it with --db {mine}")
    if (path := database.path_of(mine)) is not None and git.tracks(path):
        raise UsageError(f"git tracks {path}: write into it with --db {path}, or into another with --db PATH")
    return mine


def _is_same(first: str, second: str) -> bool:
    paths = [database.path_of(url) for url in (first, second)]
    with contextlib.suppress(OSError):
        return all(paths) and os.path.samefile(*map(str, paths))
    return False
