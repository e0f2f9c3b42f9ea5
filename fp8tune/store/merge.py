"""Merging another database: rows are found by what names them, so merging twice adds nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table, inspect, select

from fp8tune.errors import DatabaseError
from fp8tune.store import schema as db
from fp8tune.store.read import Reading
from fp8tune.store.write import Writing, stored_command

_OWN = (db.Meta, db.Decisions, db.QueuedSweeps, db.Units)
"""Tables of which each database has its own."""

Ids = Mapping[str, Mapping[int, int]]


class Merging(Writing):
    """Method that merges."""

    def merge(self, source: Reading) -> tuple[int, int]:
        """Take over every row of another database, all or nothing. Returns (trials added, trials already there).

        Raises:
            DatabaseError: A row of the other database is damaged.
        """
        source.studies()  # checks all rows
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
        tables = set(inspect(source).get_table_names())  # a database may be older than a table
        for table in db.METADATA.sorted_tables:
            if table in _OWN or table.name not in tables:
                continue
            query = select(*(column for column in table.c if column.name != "crc")).order_by(*table.primary_key)
            for part in source.execute(query, execution_options={"yield_per": 2000}).mappings().partitions():
                rows = [_translated(table, dict(row), ids) for row in part]
                if "crc" in table.c:
                    old = (row.get("id", 0) for row in part)
                    ids.setdefault(table.name, {}).update(zip(old, self._ids(table, rows), strict=True))
                else:
                    stored = self._insert(table, rows)
                    if table is db.Trials:
                        added, total = added + stored, total + len(rows)
        self.summarize(ids.get("results", {}).values())
        self._update_studies(set(ids.get("studies", {}).values()))
        return added, total


def _translated(table: Table, row: Mapping[str, Any], ids: Ids) -> dict[str, Any]:
    """Return another database's row with our ids in place of its own."""
    values = {name: value for name, value in row.items() if name != "id"}
    for name, target in _targets(table).items():
        if values[name] is not None:
            if values[name] not in ids[target]:
                raise DatabaseError(f"a row of {table.name} refers to a row that is missing; nothing was imported")
            values[name] = ids[target][values[name]]
    if table is db.Sweeps:  # another program may have written it, with a password
        values["command"] = stored_command(values["command"])
    return values


@functools.cache
def _targets(table: Table) -> dict[str, str]:
    """Return the tables that the columns of a table refer to, in the end."""
    targets = {}
    for column in table.c:
        end = column
        while end.foreign_keys:
            end = next(iter(end.foreign_keys)).column
        if end is not column and end.name == "id":
            targets[column.name] = end.table.name
    return targets
