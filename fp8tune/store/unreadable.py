"""Rows that cannot be read: each is named once, left out of everything, and may be removed.

A row is unreadable if a column may not hold its value (:mod:`fp8tune.store.columns`), or if a row that it refers to is
missing. The file is damaged then, or something else wrote to it. All other rows are still read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Double,
    Integer,
    LargeBinary,
    Select,
    String,
    Table,
    delete,
    func,
    or_,
    select,
    type_coerce,
)
from sqlalchemy.types import NullType, TypeDecorator

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.records import Status
from fp8tune.store import optional, packed, remembered
from fp8tune.store.columns import LONGEST_US
from fp8tune.store.packed import Note, Pool
from fp8tune.store.postgresql import ServerError
from fp8tune.store.schema import METADATA, STAGES, PackedTrials, Trials

NAMED_AT_ONCE = 10  # rows that are named one by one

_MISSING = "it is missing, and rows refer to it"

_NAME = re.compile(r"([a-z_]{1,40}):([0-9]{1,18})")
_CHUNK = 500
_PLAIN = ((Boolean, int), (Integer, int), (String, str), (LargeBinary, bytes))
"""Types that check nothing themselves, and what a driver may give for them."""

_logger = logging.getLogger(__name__)

RowName = tuple[str, int]
"""A table's name and a row's id."""


def leave_out(connection: Connection, table: Table, id: int, reason: str) -> None:
    """Note an unreadable row for this connection, and say so once on stderr (through :mod:`logging`)."""
    noted: set[RowName] = remembered.of(connection).setdefault("unreadable", set())
    if (table.name, id) in noted:
        return
    noted.add((table.name, id))
    if len(noted) <= NAMED_AT_ONCE:
        name = f"{table.name}:{id}"
        _logger.warning(f"left out {name}, which cannot be read: {reason} (fp8tune forget {name} removes it)")
    elif len(noted) == NAMED_AT_ONCE + 1:
        _logger.warning("left out more rows that cannot be read: fp8tune doctor says how many")


class MissingRowError(DatabaseError):
    """A row that others refer to is not there, or cannot be read."""


class ById(dict[int, Any]):
    """What the rows of a table say, by id. One that is not there is noted, and MissingRowError is raised."""

    def __init__(self, connection: Connection, table: Table, items: Iterable[tuple[int, Any]]) -> None:
        super().__init__(items)
        self._connection, self._table = connection, table

    def __missing__(self, id: int) -> Any:
        leave_out(self._connection, self._table, id, _MISSING)
        raise MissingRowError(
            f"{self._table.name}:{id} is missing, and rows refer to it: run fp8tune forget --unreadable"
        )


def readable(connection: Connection, query: Select[Any]) -> Sequence[Any]:
    """The rows of a query of table columns; those that cannot be read are noted and left out."""
    try:
        return connection.execute(query).all()
    except ServerError:
        raise
    except DatabaseError:
        return list(one_by_one(connection, query))


def packed_pools(connection: Connection, wanted: Select[Any]) -> Iterator[Pool]:
    """The packed rows whose ids a query selects; those that cannot be read are noted and left out."""
    return packed.pools(connection, wanted, functools.partial(leave_out, connection))


Made = TypeVar("Made")


def of_packed(connection: Connection, wanted: Select[Any], make: Callable[[Pool], Made]) -> Iterator[Made]:
    """What ``make`` makes of each packed row; those of which it cannot are noted and left out."""
    note = functools.partial(leave_out, connection)
    for pool in packed.pools(connection, wanted, note, check=False):
        try:
            made = make(pool)
        except DatabaseError as error:
            note(PackedTrials, pool.id, str(error))
            continue
        yield made


def stream(connection: Connection, query: Select[Any], by: Column[Any], note: Note | None = None) -> Iterator[Any]:
    """Likewise, without holding all rows in memory: by a rising column of the query that no two rows share."""
    last = None
    try:
        for row in connection.execute(query, execution_options={"yield_per": _CHUNK}):
            last = getattr(row, by.name)
            yield row
    except ServerError:
        raise
    except DatabaseError:
        rest = query if last is None else query.where(by > last)
        yield from one_by_one(connection, rest, note)


def one_by_one(connection: Connection, query: Select[Any], note: Note | None = None) -> Iterator[Any]:
    """The same, slowly: each value is checked by itself. ``note`` takes those left out."""
    note = note or functools.partial(leave_out, connection)
    columns = list(query.selected_columns)
    tables: list[Any] = list(dict.fromkeys(column.table for column in columns))
    record: Any = namedtuple("Row", [column.name for column in columns])  # type: ignore[misc]
    raw = query.with_only_columns(
        *(type_coerce(column, NullType()) for column in columns),
        *(table.c.id for table in tables),
        maintain_column_froms=True,
    )
    with any_text(connection):
        for row in connection.execute(raw, execution_options={"yield_per": _CHUNK}):
            values = []
            for column, value in zip(columns, row, strict=False):
                try:
                    values.append(_value(connection, column, value))
                except DatabaseError as error:
                    id = int(row[len(columns) + tables.index(column.table)] or 0)
                    note(column.table, id, f"{column.name}: {error}")
            if len(values) == len(columns):
                yield record(*values)


def _value(connection: Connection, column: Any, value: Any) -> Any:
    """What a column makes of a driver's value. Raises DatabaseError for one that it may not hold."""
    if isinstance(column.type, TypeDecorator):
        return column.type.process_result_value(value, connection.dialect)
    expected = next(type_ for kind, type_ in _PLAIN if isinstance(column.type, kind))
    if isinstance(value, expected) or (value is None and column.nullable):
        return value
    raise DatabaseError(f"refused {str(value)[:80]!a}: that is no {expected.__name__}")


@contextlib.contextmanager
def any_text(connection: Connection) -> Iterator[None]:
    """Read text that is not UTF-8, too: its column refuses it, where SQLite's driver would end the query."""
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.dbapi_connection
    before, driver.text_factory = driver.text_factory, lambda text: text.decode("utf-8", "surrogateescape")
    try:
        yield
    finally:
        driver.text_factory = before


def find(connection: Connection) -> dict[RowName, str]:
    """Every unreadable row of the database with the reason, and every missing row that others refer to."""
    found: dict[RowName, str] = {}

    def note(table: Table, id: int, reason: str) -> None:
        found.setdefault((table.name, id), reason)

    there = [table for table in _TABLES if optional.is_there(connection, table)]
    for table in there:
        query = select(*table.c).order_by(table.c.id)
        query = query.where(_is_suspect(connection)) if table is Trials else query
        deque(stream(connection, query, table.c.id, note), 0)
    for table in there:
        for column, parent in _references(table):
            row = select(parent.c.id).where(parent.c.id == column).exists()
            for id in connection.execute(select(type_coerce(column, NullType())).where(~row).distinct()).scalars():
                if isinstance(id, int):  # what is no id was found above
                    note(parent, id, _MISSING)
    parents = {parent for table in packed.TABLES for _, parent in _references(table)}.difference(packed.TABLES)
    ids = {parent: set(connection.execute(select(parent.c.id)).scalars()) for parent in parents}
    for pool in packed.pools(connection, select(PackedTrials.c.id), note):
        for parent, there_are in ids.items():
            for id in sorted(pool.refers_to(parent) - there_are):
                note(parent, id, _MISSING)
    return found


def first(connection: Connection, table: Table) -> str:
    """The first row of a table that cannot be read and the reason, as one text; empty where all can be."""
    found: list[str] = []
    rows = one_by_one(connection, select(*table.c), lambda of, id, reason: found.append(f"{of.name}:{id}: {reason}"))
    any(found for _ in rows)  # stops soon after the first
    return found[0] if found else ""


def forget(connection: Connection, rows: Iterable[RowName]) -> dict[str, int]:
    """Remove rows and all that refer to them. Returns how many rows went from which table."""
    removed: dict[str, int] = {}
    for name, id in rows:
        _remove(connection, METADATA.tables[name], [id], removed)
    return removed


def parse_name(text: str) -> RowName:
    """``trials:17`` -> the table and the id. Raises UsageError for any other text."""
    match = _NAME.fullmatch(text)
    if match is None or match[1] not in METADATA.tables or "id" not in METADATA.tables[match[1]].c:
        raise UsageError(f"{text[:80]!r} names no row: write it as it was named, such as trials:17")
    return match[1], int(match[2])


def _remove(connection: Connection, table: Table, ids: Sequence[int], removed: dict[str, int]) -> None:
    if table is not PackedTrials and ids:
        packed.unpack_referring(connection, table, ids)
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        for child in _TABLES:
            for column, parent in _references(child):
                if parent is table:
                    query = select(child.c.id).where(column.in_(chunk))
                    _remove(connection, child, connection.execute(query).scalars().all(), removed)
        gone = connection.execute(delete(table).where(table.c.id.in_(chunk))).rowcount
        removed[table.name] = removed.get(table.name, 0) + gone


_TABLES = [table for table in METADATA.sorted_tables if "id" in table.c]


def _references(table: Table) -> list[tuple[Column[Any], Table]]:
    """The columns that refer to other tables, with those."""
    return [(column, foreign.column.table) for column in table.c for foreign in column.foreign_keys]


def _is_suspect(connection: Connection) -> Any:
    """The condition that a trial may be unreadable, on the columns of its index: samples would take far longer."""
    time_us: Any = type_coerce(Trials.c.time_us, Double())  # the column's own type refuses a 0 to compare with
    suspect = [
        time_us <= 0,
        time_us > LONGEST_US,
        Trials.c.stage.not_in(STAGES),
        Trials.c.status.not_in(list(map(str, Status))),
    ]
    if connection.dialect.name == "sqlite":  # which keeps what a column is not for
        numbers = {"integer": ("candidate_id", "worker_id", "sweep_id", "round"), "real": ("created_at", "time_us")}
        for kind, names in numbers.items():
            suspect += [func.typeof(Trials.c[name]).not_in([kind, "integer"]) for name in names]
        suspect[-1] = suspect[-1] & Trials.c.time_us.is_not(None)
    return or_(*suspect)
