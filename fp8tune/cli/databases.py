"""Databases of a command: the one that it writes, and those that it reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8tune.errors import UsageError
from fp8tune.redaction import redacted

if TYPE_CHECKING:
    from fp8tune.store.layers import Reader  # imports SQLAlchemy


def check(db: str) -> None:
    """Raise UsageError for a ``--db`` that has a password, or that is gone when the command ends."""
    from fp8tune.store import database

    if redacted(db) != db:
        raise UsageError(
            "a password in --db is visible to other users: put it into PGPASSWORD, ~/.pgpass or FP8TUNE_DB"
        )
    if database.is_in_memory(db):
        raise UsageError(f"--db {db!r} is a database in memory, gone when the command ends: name a file")


@contextlib.contextmanager
def opened(db: str | None) -> Iterator[tuple[Reader, str]]:
    """Open ``--db``, or the user's own results with those that come with fp8tune; yield them with their label."""
    from fp8tune.output.tables import notice
    from fp8tune.store import layers, location

    databases = location.to_read(db, notice)
    with layers.opened_databases(databases, notice) as reader:
        yield reader, databases.label
