"""Merging another database: rows are found by what names them, so merging twice adds nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Table, inspect, select, text

from fp8tune.errors import DatabaseError
from fp8tune.records import NamedInts
from fp8tune.store import schema as db
from fp8tune.store.read import Reading
from fp8tune.store.texts import parse_named_ints
from fp8tune.store.write import Writing, stored_command

FULL = 1
"""Schema of the full set of trials of November 2026: a subset of the columns, with the same meanings."""

READABLE = (db.VERSION, *db.MIGRATIONS, 21, FULL)
"""Versions of the schema that can be merged; 21 had other columns of decisions."""

_OWN = (db.Meta, db.Decisions)
"""Tables of which each database has its own."""

_CHUNK = 2000


class Merging(Writing):
    """Method that merges."""

    def merge(self, source: Reading) -> tuple[int, int]:
        """Take over every row of another database, all or nothing. Returns (trials added, trials already there).

        Raises:
            DatabaseError: A row of the other database is damaged.
        """
        if source.version != FULL:
            source.studies()  # checks all rows
        if source.version == db.VERSION:
            source.programs()
        self._is_merging = True
        try:
            with source.transaction() as connection:
                added, total = self.run(lambda: self._merge(connection), write=True)
        finally:
            self._is_merging = False
        if added >= 10_000:  # the planner goes by what was there before
            self.execute_alone("ANALYZE")
        return added, total - added

    def _merge(self, source: Connection) -> tuple[int, int]:
        ids: dict[str, dict[int, int]] = {}
        added = total = 0
        for table in db.METADATA.sorted_tables:
            rows = _rows(source, table) if table not in _OWN else iter(())
            while chunk := list(itertools.islice(rows, _CHUNK)):
                translated = [_translated(table, row, ids) for row in chunk]
                if table in (db.Trials, db.TrialDetails):
                    stored = self._insert(table, translated)
                    if table is db.Trials:
                        added, total = added + stored, total + len(chunk)
                else:
                    new_ids = self._ids(table, translated)
                    old_ids = (row.get("id", 0) for row in chunk)
                    ids.setdefault(table.name, {}).update(zip(old_ids, new_ids, strict=True))
        self.summarize(ids.get("results", {}).values())
        self._update_studies(set(ids.get("studies", {}).values()))
        return added, total


def _rows(source: Connection, table: Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table with the columns of this schema that they have, by their ids."""
    if not inspect(source).has_table(table.name):  # the table is newer than the database
        return
    stored = {column["name"] for column in inspect(source).get_columns(table.name)} - {"crc"}
    query = select(*(column for column in table.c if column.name in stored)).select_from(table)
    if table is db.Problems and "flops" not in stored:  # the full set of trials has them in its studies
        query = query.add_columns(text("(SELECT max(flops) FROM studies WHERE problem_id = problems.id) AS flops"))
    query = query.order_by(*(column for column in table.primary_key if column.name in stored))
    for row in source.execute(query, execution_options={"yield_per": _CHUNK}).mappings():
        yield _upgraded(table, dict(row))


def _upgraded(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    """Add what the full set of trials does not say: columns that its schema did not have yet."""
    if table is db.Sweeps:
        row["command"] = stored_command(row["command"])
    elif table is db.Devices and "timing" not in row and row["multiprocessors"]:
        row |= {"timing": "events", "codegen": "fp_fusion=1"}
    elif table is db.Configs:
        row.setdefault("canonical", row["text"])
    elif table is db.Problems and "canonical" not in row:
        shape = parse_named_ints(row["shape"])
        order = [name for name in ("M", "N", "K") if name in shape]
        ordered = NamedInts({name: shape[name] for name in dict.fromkeys([*order, *shape])})
        row |= {"canonical": row["shape"], "shape": str(ordered)}
    elif table in (db.Trials, db.TrialDetails) and isinstance(row["stage"], str):
        row["stage"] = ("coarse", "final", "control").index(row["stage"])
    elif table is db.StudyRuns:
        row["reference"] = row["reference"] or ""
    elif table is db.Calibrations:
        row.setdefault("created_at", float(row["sweep_id"]))
    return row


def _translated(table: Table, row: dict[str, Any], ids: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Return another database's row with our ids in place of its own."""
    values = {name: value for name, value in (db.defaults(table) | row).items() if name != "id"}
    for name, target in _targets(table).items():
        value = values.get(name)
        if value is not None:
            if value not in ids[target]:
                raise DatabaseError(f"a row of {table.name} refers to a row that is missing; nothing was imported")
            values[name] = ids[target][value]
    return values


@functools.cache
def _targets(table: Table) -> dict[str, str]:
    """Return the tables that the columns of a table refer to, in the end."""
    targets = {}
    for column in table.c:
        end: Any = column
        while end.foreign_keys:
            end = next(iter(end.foreign_keys)).column
        if end is not column and end.name == "id":
            targets[column.name] = end.table.name
    return targets
