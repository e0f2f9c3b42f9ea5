"""Merging another database: rows are found by what names them, so merging twice adds nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Table, select, text

from fp8tune.errors import DatabaseError
from fp8tune.records import NamedInts
from fp8tune.store import schema as db
from fp8tune.store.read import Reading
from fp8tune.store.texts import parse_named_ints
from fp8tune.store.write import Named, Writing, defaults, stored_command

FULL = 1
"""Schema of the full set of trials of November 2026: a subset of the columns, with the same meanings."""

_SHARED = (db.Devices, db.Configs, db.Versions, db.Problems, db.Sweeps, db.Processes, db.Studies)
_ROWS = (db.Codes, db.Trials, db.TrialDetails, db.PublishedOperations, db.RecordedLaunches, db.SharedLaunches)
_NEWER = {"versions": ("axes", "key"), "problems": ("flops",)}
_CHUNK = 2000


class Merging(Reading, Writing):
    """Method that merges."""

    def merge(self, other: Reading) -> tuple[int, int]:
        """Take over every row of another database, all or nothing. Returns (trials added, trials already there).

        Raises:
            DatabaseError: A row of the other database is damaged.
        """
        if other.database.version == db.VERSION:
            other.evidence()  # raises for a row whose checksum differs
        self._is_merging = True
        try:
            with other.database.transaction() as source:
                added, given = self.run(lambda: self._merge(source), write=True)
        finally:
            self._is_merging = False
        if added >= 10_000:
            self.database.analyze()
        return added, given - added

    def _merge(self, source: Connection) -> tuple[int, int]:
        ids: dict[str, dict[int, Named]] = {}
        flops = {row["problem_id"]: row.get("flops") for row in _rows(source, db.Studies)}
        for table in _SHARED:
            rows = (_upgraded(table, row, flops) for row in _rows(source, table))
            ids[table.name] = {row["id"]: self._merged(table, row, ids) for row in rows}
        with_names = [
            {**defaults(db.Results), **_translated(db.Results, row, ids)} for row in _rows(source, db.Results)
        ]
        results = dict(zip((row["id"] for row in _rows(source, db.Results)), self._results(with_names), strict=True))
        ids["results"] = {old: Named(new, 0) for old, new in results.items()}
        for table in (db.StudyRuns, db.Calibrations):
            for row in _rows(source, table):
                self._merged(table, _upgraded(table, row, flops), ids)
        for row in _rows(source, db.RemovedTrials):
            self._insert(db.RemovedTrials, [{**row, "study_id": ids["studies"][row["study_id"]].id}])
        added = given = 0
        for table in _ROWS:
            rows = (_translated(table, _upgraded(table, row, flops), ids) for row in _rows(source, table))
            while chunk := [{n: getattr(v, "id", v) for n, v in row.items()} for row in itertools.islice(rows, _CHUNK)]:
                if table is db.RecordedLaunches:
                    chunk = [{"problem_id": row["problem_id"], "document": row["document"]} for row in chunk]
                stored = self._insert(table, chunk)
                if table in (db.Trials, db.PublishedOperations):
                    added, given = added + stored, given + len(chunk)
        self.summarize(set(results.values()))
        for study in ids["studies"].values():
            self.update_study(study.id)
        return added, given

    def _merged(self, table: Table, row: Mapping[str, Any], ids: Mapping[str, Mapping[int, Named]]) -> Named:
        values = {**defaults(table), **_translated(table, row, ids)}
        key = {name: values.pop(name) for name in db.unique_names(table)}
        newer = {name: values[name] for name in _NEWER.get(table.name, ()) if values.get(name) is not None}
        if table in (db.StudyRuns, db.Studies):
            newer = {name: value for name, value in values.items() if value is not None}
        return self._name(table, key, values, newer=newer)


def _rows(source: Connection, table: Table) -> Iterator[dict[str, Any]]:
    names = {row[1] for row in source.exec_driver_sql(f"PRAGMA table_info({table.name})")} if _is_file(source) else None
    if names is not None and not names:  # the table is newer than the database
        return
    columns = [column for column in table.c if (names is None or column.name in names) and column.name != "crc"]
    order = [column for column in table.primary_key if column in columns]
    extra = [text(name) for name in sorted((names or set()) - set(table.c.keys()))]
    query = select(*columns, *extra).select_from(table).order_by(*order)
    for row in source.execute(query, execution_options={"yield_per": _CHUNK}).mappings():
        yield dict(row)


def _is_file(source: Connection) -> bool:
    return source.dialect.name == "sqlite"


def _upgraded(table: Table, row: dict[str, Any], flops: Mapping[int, int | None]) -> dict[str, Any]:
    """Add what the full set of trials does not say: columns that its schema did not have yet."""
    if table is db.Sweeps:
        row = {**row, "command": stored_command(row["command"])}
    if table is db.Devices and "timing" not in row and row["multiprocessors"]:
        return {**row, "timing": "events", "codegen": "fp_fusion=1"}
    if table is db.Configs and "canonical" not in row:
        return {**row, "canonical": row["text"]}
    if table is db.Problems and "canonical" not in row:
        shape = parse_named_ints(row["shape"])
        order = [name for name in ("M", "N", "K") if name in shape]
        ordered = NamedInts({name: shape[name] for name in dict.fromkeys([*order, *shape])})
        return {**row, "canonical": row["shape"], "shape": str(ordered), "flops": flops.get(row["id"])}
    if isinstance(stage := row.get("stage"), str):
        return {**row, "stage": ("coarse", "final", "control").index(stage)}
    if table is db.StudyRuns and row["reference"] is None:
        return {**row, "reference": ""}
    if table is db.Calibrations and "created_at" not in row:
        return {**row, "created_at": float(row["sweep_id"])}
    return row


def _translated(table: Table, row: Mapping[str, Any], ids: Mapping[str, Mapping[int, Named]]) -> dict[str, Any]:
    """Return another database's row with our rows in place of its ids."""
    values = {name: value for name, value in row.items() if name != "id" and name in table.c}
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
        for key in column.foreign_keys:
            end = key.column
            while end.foreign_keys:
                end = next(iter(end.foreign_keys)).column
            if end.name == "id":
                targets[column.name] = end.table.name
    return targets
