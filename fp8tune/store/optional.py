"""Tables and views that a database may lack: it is read as if they were empty, and gets them when next written to.

A step of :mod:`fp8tune.store.migrations` would have each reader of an older file copy all of it first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from sqlalchemy import Connection, Table

from fp8tune.store import remembered, views
from fp8tune.store.schema import METADATA, OPTIONAL

_LACKING = "fp8tune: tables that the database lacks"
_VIEWS = "fp8tune: whether the database is known to have today's views"


def note(connection: Connection, tables: Collection[str]) -> None:
    """Take down what a database of these tables lacks."""
    remembered.of(connection)[_LACKING] = tuple(table for table in OPTIONAL if table.name not in tables)


def is_there(connection: Connection, table: Table) -> bool:
    """Whether a table can be read; one that cannot be is empty."""
    return table not in _lacking(connection)


def make(connection: Connection) -> None:
    """Make what is lacking, within the caller's transaction, which may be rolled back."""
    if lacking := _lacking(connection):
        METADATA.create_all(connection, tables=lacking)
    if not (remembered.of(connection).get(_VIEWS) or views.are_there(connection)):
        views.create(connection)


def _lacking(connection: Connection) -> tuple[Table, ...]:
    return cast(tuple[Table, ...], remembered.of(connection).get(_LACKING, ()))


def note_made(connection: Connection) -> None:
    """Note that what :func:`make` made is there to stay."""
    remembered.of(connection).pop(_LACKING, None)
    remembered.of(connection)[_VIEWS] = True
