"""Picks and finalists as they were decided: kept beside the rows that they were decided from.

Who decides is above the store (:mod:`fp8tune.sweep.picks`). Rows that come later make what is kept stale: ``meta``
says from which rows, and by what, it was decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import Connection, String, Table, delete, insert, literal_column, select, type_coerce, update

from fp8tune.errors import DatabaseError
from fp8tune.records import Decided, Device, Finalist, KernelVersion, Kind, NamedInts, Pick, Problem
from fp8tune.store import optional, views
from fp8tune.store.columns import UNSTATED, parse_named_ints
from fp8tune.store.schema import (
    Candidates,
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

CandidateId = Callable[[Pick | Finalist], int]
"""The id of the candidate that a pick or finalist is."""

ConfigId = Callable[[NamedInts | None], int]
"""The id of a config."""


def rows_now(connection: Connection) -> str:
    """A text that changes with the rows that picks are decided from."""
    return str(connection.scalar(select(literal_column(views.ROWS))))


def decided_from(connection: Connection) -> tuple[str, str]:
    """From which rows, and by what, the kept picks were decided; empty where none were kept."""
    query = select(Meta.c.name, Meta.c.value).where(Meta.c.name.in_((views.DECIDED_FROM, _DECIDED_BY)))
    stated = {row.name: row.value for row in connection.execute(query)}
    return stated.get(views.DECIDED_FROM, ""), stated.get(_DECIDED_BY, "")


def keep(connection: Connection, decided: Decided, ids: CandidateId, config_id: ConfigId, rows: str, by: str) -> None:
    """Put these in place of those that were kept. One that says what it said keeps its moment."""
    picks = {}
    for pick in decided.picks:
        runner_up_id = None if pick.runner_up is None else config_id(pick.runner_up)
        picks[ids(pick)] = {**_values(Picks, pick), "runner_up_id": runner_up_id}
    _replace(connection, Picks, picks)
    _replace(connection, Finalists, {ids(one): _values(Finalists, one) for one in decided.finalists})
    views.state(connection, views.DECIDED_FROM, rows)
    views.state(connection, _DECIDED_BY, by)


def kept(connection: Connection) -> Decided:
    """What was kept, in the order of the candidates' ids. Raises DatabaseError if a row of it cannot be read."""
    if not (optional.is_there(connection, Picks) and optional.is_there(connection, Finalists)):
        return Decided((), ())
    try:
        picks = _read(connection, Picks, Pick, type_coerce(_RunnerUp.c["items"], String).label("runner_up"))
        return Decided(tuple(picks), tuple(_read(connection, Finalists, Finalist)))
    except (ValueError, TypeError) as error:  # a damaged file holds anything
        raise DatabaseError(f"the kept picks cannot be read: {error}") from None


def _values(table: Table, of: Pick | Finalist) -> dict[str, Any]:
    return {name: value for name, value in vars(of).items() if name in table.c}


def _replace(connection: Connection, table: Table, wanted: Mapping[int, Mapping[str, Any]]) -> None:
    """Only rows that say something else are written: the file changes as little as the picks."""
    try:
        there = {row["candidate_id"]: dict(row) for row in connection.execute(select(table)).mappings()}
    except DatabaseError:  # one that cannot be read
        connection.execute(delete(table))
        there = {}
    gone = [id for id in there if id not in wanted]
    for id in gone:
        connection.execute(delete(table).where(table.c.candidate_id == id))
    now = time.time()
    new = [{"candidate_id": id, **values, "decided_at": now} for id, values in wanted.items() if id not in there]
    if new:
        connection.execute(insert(table), sorted(new, key=lambda row: row["candidate_id"]))
    for id, values in wanted.items():
        if id in there and values.items() - there[id].items():
            same = table.c.candidate_id == id
            connection.execute(update(table).where(same).values(**values, decided_at=now))


def _read(connection: Connection, table: Table, record: type[Of], *columns: Any) -> Iterable[Of]:
    """The records of a table, with what their candidates hold."""
    of_problem = [Problems.c[field.name].label(f"problem_{field.name}") for field in fields(Problem)]
    of_device = [Devices.c[field.name].label(f"device_{field.name}") for field in fields(Device)]
    of_version = [KernelVersions.c[field.name].label(f"version_{field.name}") for field in fields(KernelVersion)]
    wanted = {field.name for field in fields(record)}
    own = [column for column in table.c if column.name in wanted]
    query = (
        select(*own, *columns, *of_problem, *of_device, *of_version)
        .add_columns(Configs.c["items"].label("config"), LookupKeys.c["items"].label("lookup_key"))
        .add_columns(Candidates.c.kind, Candidates.c.bytes_moved, Candidates.c.source, Candidates.c.note)
        .join_from(table, Candidates, Candidates.c.id == table.c.candidate_id)
        .join(Problems, Problems.c.id == Candidates.c.problem_id)
        .join(Devices, Devices.c.id == Candidates.c.device_id)
        .join(KernelVersions, KernelVersions.c.id == Candidates.c.version_id)
        .join(Configs, Configs.c.id == Candidates.c.config_id)
        .join(LookupKeys, LookupKeys.c.id == Candidates.c.lookup_key_id)
        .order_by(table.c.candidate_id)
    )
    if table is Picks:
        query = query.outerjoin(_RunnerUp, _RunnerUp.c.id == Picks.c.runner_up_id)
    for row in connection.execute(query).mappings():
        version = _record(KernelVersion, "version", row)
        found: dict[str, Any] = {name: value for name, value in row.items() if name in wanted}
        found |= {"problem": _record(Problem, "problem", row), "device": _record(Device, "device", row)}
        found |= {"kind": Kind(row["kind"]), "version": version if version.source_hash else None}
        if (runner_up := found.get("runner_up")) is not None:
            found["runner_up"] = None if runner_up == UNSTATED else parse_named_ints(runner_up)
        yield record(**found)


def _record(record: type[Any], prefix: str, row: Any) -> Any:
    return record(**{field.name: row[f"{prefix}_{field.name}"] for field in fields(record)})
