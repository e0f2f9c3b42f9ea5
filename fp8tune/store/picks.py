"""Picks and finalists as they were decided: kept beside the rows that they were decided from.

Who decides is above the store (:mod:`fp8tune.sweep.picks`). Rows that come later make what is kept stale: ``meta``
says from which rows, and by what, it was decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Connection, String, Table, bindparam, delete, insert, literal_column, select, type_coerce

from fp8tune.errors import DatabaseError
from fp8tune.records import Decided, Device, Finalist, KernelVersion, Kind, Pick, Problem
from fp8tune.store import optional, views
from fp8tune.store.columns import UNSTATED, parse_named_ints
from fp8tune.store.schema import (
    Configs,
    Devices,
    Finalists,
    KernelVersions,
    LookupKeys,
    Meta,
    Picks,
    Problems,
)

_DECIDED_BY = "picks decided by"

_RunnerUp = Configs.alias("runner_up")

Of = TypeVar("Of", Pick, Finalist)

About = Callable[[Pick | Finalist], Mapping[str, Any]]
"""The columns that say what a pick or finalist is about."""


def rows_now(connection: Connection) -> str:
    """A text that changes with the rows that picks are decided from."""
    return str(connection.scalar(select(literal_column(views.ROWS))))


def decided_from(connection: Connection) -> tuple[str, str]:
    """From which rows, and by what, the kept picks were decided; empty where none were kept."""
    query = select(Meta.c.name, Meta.c.value).where(Meta.c.name.in_((views.DECIDED_FROM, _DECIDED_BY)))
    stated = {row.name: row.value for row in connection.execute(query)}
    return stated.get(views.DECIDED_FROM, ""), stated.get(_DECIDED_BY, "")


def keep(connection: Connection, decided: Decided, about: About, rows: str, by: str) -> None:
    """Put these in place of those that were kept. One that says what it said keeps its moment."""
    _replace(connection, Picks, [{**_said(Picks, of), **about(of)} for of in decided.picks])
    _replace(connection, Finalists, [{**_said(Finalists, of), **about(of)} for of in decided.finalists])
    views.state(connection, views.DECIDED_FROM, rows)
    views.state(connection, _DECIDED_BY, by)


def kept(connection: Connection) -> Decided:
    """What was kept, in no order. Raises DatabaseError if a row of it cannot be read."""
    if not (optional.is_there(connection, Picks) and optional.is_there(connection, Finalists)):
        return Decided((), ())
    try:
        named = type_coerce(_RunnerUp.c["items"], String).label("runner_up"), LookupKeys.c["items"].label("lookup_key")
        picks = _read(connection, Picks, Pick, *named)
        return Decided(tuple(picks), tuple(_read(connection, Finalists, Finalist)))
    except (ValueError, TypeError) as error:  # a damaged file holds anything
        raise DatabaseError(f"the kept picks cannot be read: {error}") from None


def _said(table: Table, of: Pick | Finalist) -> dict[str, Any]:
    return {name: value for name, value in vars(of).items() if name in table.c}


def _replace(connection: Connection, table: Table, wanted: Sequence[dict[str, Any]]) -> None:
    """Only rows that say something else are written: the file changes as little as the picks."""
    key = [column.name for column in table.primary_key]
    try:
        found = connection.execute(select(table)).mappings().all()
    except DatabaseError:  # one that cannot be read
        connection.execute(delete(table))
        found = []
    there = {tuple(row[name] for name in key): row for row in found}
    new = {tuple(row[name] for name in key): row for row in wanted}
    gone = [place for place, row in there.items() if place not in new or new[place].items() - row.items()]
    same = [table.c[name] == bindparam(f"of_{name}") for name in key]
    if gone:
        names = [f"of_{name}" for name in key]
        connection.execute(delete(table).where(*same), [dict(zip(names, place, strict=True)) for place in gone])
    added = [place for place in sorted(new) if place not in there or place in set(gone)]
    if added:
        now = time.time()
        connection.execute(insert(table), [{**new[place], "decided_at": now} for place in added])


def _read(connection: Connection, table: Table, record: type[Of], *columns: Any) -> Iterator[Of]:
    """The records of a table, with what they are about."""
    shared = {"problem": (Problem, Problems), "device": (Device, Devices), "version": (KernelVersion, KernelVersions)}
    wanted = {field.name for field in fields(record)}
    query = select(*(column for column in table.c if column.name in wanted), Configs.c["items"].label("config"))
    query = query.add_columns(*columns).join_from(table, Configs, Configs.c.id == table.c.config_id)
    for name, (kind, of) in shared.items():
        query = query.add_columns(*(of.c[field.name].label(f"{name}_{field.name}") for field in fields(kind)))
        query = query.join(of, of.c.id == table.c[f"{name}_id"])
    if table is Picks:
        query = query.outerjoin(_RunnerUp, _RunnerUp.c.id == Picks.c.runner_up_id)
        query = query.join(LookupKeys, LookupKeys.c.id == Picks.c.lookup_key_id)
    for row in connection.execute(query).mappings():
        found = {name: value for name, value in row.items() if name in wanted}
        for name, (kind, _) in shared.items():
            found[name] = kind(**{field.name: row[f"{name}_{field.name}"] for field in fields(kind)})
        if not found["version"].source_hash:
            found["version"] = None
        if found.get("runner_up") is not None:
            found["runner_up"] = None if row["runner_up"] == UNSTATED else parse_named_ints(row["runner_up"])
        yield record(**{**found, "kind": Kind(row["kind"])})
