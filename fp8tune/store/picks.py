"""Picks as they were decided last, so that reading them need not read all results."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from sqlalchemy import delete, func, insert, select

from fp8tune.records import Pick, Subject
from fp8tune.store import schema as db
from fp8tune.store.database import reads, writes
from fp8tune.store.rows import Names, checked_rows
from fp8tune.store.write import Writing

_DECIDED_BY = "decided_by"
_CONFIGS = {"config": "config_id", "runner_up": "runner_up_id", "today": "today_id"}
_COLUMNS = [field.name for field in fields(Pick) if field.name in db.Decisions.c]
_OF_STUDY = ("problem", "device", "kind", "version", "lookup_key", "bytes_moved", "newest")


class Deciding(Writing):
    """Methods that keep picks."""

    @writes
    def keep_picks(self, picks: Iterable[Pick], by: str) -> None:
        """Replace all kept picks. ``by`` names the rules and tables that decided."""
        rows = []
        for pick in picks:
            subject = Subject(pick.version, pick.device, pick.kind, pick.problem)  # type: ignore[arg-type]
            row = {name: getattr(pick, name) for name in _COLUMNS}
            row |= {name: int(value) for name, value in row.items() if isinstance(value, bool)}
            row |= {"study_id": self._study(subject, None), "decided_at": time.time()}
            for name, column in _CONFIGS.items():
                config = getattr(pick, name)
                row[column] = None if config is None else self._config(config)
            rows.append(row | {"crc": db.row_checksum(db.Decisions, row)})
        self._connection.execute(delete(db.Decisions))
        self._insert(db.Decisions, rows)
        self._connection.execute(delete(db.Meta).where(db.Meta.c.name == _DECIDED_BY))
        self._connection.execute(insert(db.Meta).values(name=_DECIDED_BY, value=f"{by} {self._evidence()}"))

    @reads
    def has_kept_picks(self, by: str) -> bool:
        """Return True if the kept picks were decided from the rows as they are now, and by this."""
        stored = self._connection.scalar(select(db.Meta.c.value).where(db.Meta.c.name == _DECIDED_BY))
        return bool(stored == f"{by} {self._evidence()}")

    @reads
    def kept_picks(self) -> list[Pick]:
        """Return the picks that were kept, stale or not."""
        names, picks = Names(self._connection), []
        for row in checked_rows(self._connection, db.Decisions):
            study, value = names.studies[row.study_id], row._mapping
            values: dict[str, Any] = {name: value[column] for name, column in _CONFIGS.items()}
            values = {name: None if id is None else names.configs[id] for name, id in values.items()}
            values |= {name: bool(value[name]) if name.startswith("is_") else value[name] for name in _COLUMNS}
            values |= {name: getattr(study, name) for name in _OF_STUDY}
            picks.append(Pick(is_complete=study.complete, **values))
        return picks

    def _evidence(self) -> str:
        """Return a text that changes with the rows that picks are decided from."""
        tables = (db.Results, db.StudyRuns, db.Studies, db.Calibrations)
        sums = (select(func.count(), func.coalesce(func.sum(table.c.crc), 0)).select_from(table) for table in tables)
        return " ".join(f"{n}/{int(total):x}" for query in sums for n, total in self._connection.execute(query))
