"""Picks as they were decided last, so that reading them need not read all results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import delete, func, insert, select

from fp8tune.records import Pick
from fp8tune.store import schema as db
from fp8tune.store.connected import reads, writes
from fp8tune.store.read import Gathering, Reading
from fp8tune.store.write import Writing

_DECIDED_BY = "decided_by"
_CONFIGS = {"config": "config_id", "runner_up": "runner_up_id", "today": "today_id"}
_COLUMNS = [field.name for field in fields(Pick) if field.name in db.Decisions.c]


class Deciding(Reading, Writing):
    """Methods that keep picks."""

    @writes
    def keep_picks(self, picks: Iterable[Pick], by: str) -> None:
        """Replace all kept picks. ``by`` names the rules and tables that decided."""
        rows = []
        for pick in picks:
            version = self._version(pick.version, pick.problem.kernel)
            key: dict[str, Any] = {"problem_id": self._problem(pick.problem), "version_id": version}
            key |= {"device_id": self._device(pick.device), "kind": str(pick.kind)}
            named: dict[str, Any] = {"study_id": self._name(db.Studies, key)}
            for name, column in _CONFIGS.items():
                config = getattr(pick, name)
                named[column] = None if config is None else self._config(config)
            row = {name: getattr(pick, name) for name in _COLUMNS} | {"decided_at": time.time()}
            row |= {name: value and value.id for name, value in named.items()}
            identities = {name: value.identity for name, value in named.items() if value is not None}
            row |= {name: int(value) for name, value in row.items() if isinstance(value, bool)}
            rows.append(row | {"crc": db.row_checksum(db.Decisions, row, identities)})
        self._connection.execute(delete(db.Decisions))
        self._insert(db.Decisions, rows)
        self._connection.execute(delete(db.Meta).where(db.Meta.c.name == _DECIDED_BY))
        self._connection.execute(insert(db.Meta).values(name=_DECIDED_BY, value=f"{by} {self._evidence_now()}"))

    @reads
    def has_kept_picks(self, by: str) -> bool:
        """Return True if the kept picks were decided from the rows as they are now, and by this."""
        kept = self._connection.scalar(select(db.Meta.c.value).where(db.Meta.c.name == _DECIDED_BY))
        return bool(kept == f"{by} {self._evidence_now()}")

    @reads
    def kept_picks(self) -> list[Pick]:
        """Return the picks that were kept, stale or not."""
        gathering = Gathering(self._connection)
        studies = {study.id: study for study in gathering.studies}
        rows = gathering.names.checked_rows(db.Decisions)
        return [_pick(row._mapping, studies[row.study_id], gathering) for row in rows]

    def _evidence_now(self) -> str:
        """Return a text that changes with the rows that picks are decided from."""
        sums = (
            self._connection.execute(select(func.count(), func.coalesce(func.sum(table.c.crc), 0)).select_from(table))
            for table in (db.Results, db.StudyRuns, db.Studies, db.Calibrations)
        )
        return " ".join(f"{count}/{int(total):x}" for result in sums for count, total in result)


def _pick(row: Mapping[str, Any], study: Any, gathering: Gathering) -> Pick:
    problem, device, kind, version = gathering.names.subject(study)
    configs: dict[str, Any] = {}
    for name, column in _CONFIGS.items():
        configs[name] = None if row[column] is None else gathering.names.configs[row[column]]
    values = {name: row[name] for name in _COLUMNS}
    values |= {name: bool(value) for name, value in values.items() if name.startswith("is_")}
    return Pick(
        problem=problem,
        device=device,
        kind=kind,
        version=version,
        lookup_key=gathering.lookup_key(study),
        bytes_moved=study.bytes_moved,
        newest=float(study.timed_at),
        is_complete=gathering.is_complete(study),
        **configs,
        **{name: value for name, value in values.items() if name != "is_complete"},
    )
