"""Picks and finalists as they were decided: kept beside the rows that they were decided from.

Who decides is above the store (:mod:`fp8tune.sweep.picks`). Rows that come later make what is kept stale: ``meta``
says from which rows, and by what, it was decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Column, Connection, Table, bindparam, delete, insert, literal_column, select, union

from fp8tune.errors import DatabaseError
from fp8tune.records import Decided, Device, Finalist, KernelVersion, Kind, NamedInts, Pick, Problem
from fp8tune.store import optional, views
from fp8tune.store.postgresql import ServerError
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

About = Callable[[Pick | Finalist], Mapping[str, Any]]
"""The columns that say what a pick or finalist is about."""


def rows_now(connection: Connection) -> str:
    """A text that changes with the rows that picks are decided from."""
    return str(connection.scalar(select(literal_column(views.ROWS))))


def decided_from(connection: Connection) -> tuple[str, str]:
    """From which rows, and by what, the kept picks were decided; empty where none were kept."""
    if not optional.is_there(connection, Picks):
        return "", ""
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
        about = _About.load(connection)
        picks = [Pick(**about.of(row), **_fields(Pick, row)) for row in _rows(connection, Picks)]
        finalists = [Finalist(**about.of(row), **_fields(Finalist, row)) for row in _rows(connection, Finalists)]
        return Decided(tuple(picks), tuple(finalists))
    except (ValueError, TypeError, KeyError) as error:  # a damaged file holds anything
        raise DatabaseError(f"the kept picks cannot be read: {error}") from None


def _said(table: Table, of: Pick | Finalist) -> dict[str, Any]:
    return {name: value for name, value in vars(of).items() if name in table.c}


def _replace(connection: Connection, table: Table, wanted: Sequence[dict[str, Any]]) -> None:
    """Only rows that say something else are written: the file changes as little as the picks."""
    key = [column.name for column in table.primary_key]
    try:
        found = connection.execute(select(table)).mappings().all()
    except ServerError:
        raise
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


@dataclass(frozen=True)
class _About:
    """What picks and finalists are about, by id: most rows share it."""

    problems: Mapping[int, Problem]
    devices: Mapping[int, Device]
    versions: Mapping[int, KernelVersion]
    configs: Mapping[int | None, NamedInts | None]
    lookup_keys: Mapping[int | None, NamedInts | None]

    @classmethod
    def load(cls, connection: Connection) -> _About:
        def records(table: Table, record: type[Any]) -> dict[int, Any]:
            names = [field.name for field in fields(record)]
            rows = connection.execute(select(table.c.id, *(table.c[name] for name in names)))
            return {row[0]: record(*row[1:]) for row in rows}

        def items(table: Table, *columns: Column[Any]) -> dict[int | None, NamedInts | None]:
            named = union(*(select(column) for column in columns))
            rows = connection.execute(select(table.c.id, table.c["items"]).where(table.c.id.in_(named)))
            return {row[0]: row[1] for row in rows}

        return cls(
            problems=records(Problems, Problem),
            devices=records(Devices, Device),
            versions=records(KernelVersions, KernelVersion),
            configs=items(Configs, Picks.c.config_id, Picks.c.runner_up_id, Picks.c.today_id, Finalists.c.config_id),
            lookup_keys=items(LookupKeys, Picks.c.lookup_key_id),
        )

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Raises KeyError for what is missing."""
        version = self.versions[row["version_id"]]
        found: dict[str, Any] = {
            "problem": self.problems[row["problem_id"]],
            "device": self.devices[row["device_id"]],
            "version": version if version.source_hash else None,
            "config": self.configs[row["config_id"]],
            "kind": Kind(row["kind"]),
        }
        if "lookup_key_id" in row:
            found["lookup_key"] = self.lookup_keys[row["lookup_key_id"]]
            for name in ("runner_up", "today"):
                config_id = row[f"{name}_id"]
                found[name] = None if config_id is None else self.configs[config_id]
        return found


def _rows(connection: Connection, table: Table) -> Iterator[Mapping[str, Any]]:
    return map(dict, connection.execute(select(table)).mappings())


def _fields(record: type[Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row itself says."""
    return {field.name: row[field.name] for field in fields(record) if field.name in row and field.name != "kind"}
