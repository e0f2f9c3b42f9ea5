"""The results database as the rest of fp8tune sees it: records go in, records come out, connections never leave."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import delete, func, insert, select

from fp8tune.records import Kind, NamedInts, Pick, Subject
from fp8tune.store import schema as db
from fp8tune.store.database import reads, writes
from fp8tune.store.frames import Framing
from fp8tune.store.merge import Merging
from fp8tune.store.read import COPY_CEILING, OF_STUDY, Tally
from fp8tune.store.rows import Names, checked_rows

__all__ = ["COPY_CEILING", "FASTEST", "Store", "Tally"]

FASTEST = 28
"""Coarse results of each study that pruning leaves besides finals and configs that are picked anywhere for the kernel.

With 20 the shipped table got another row by which keys without a row are looked up; with 28 it is the same.
"""

_DECIDED_BY = "decided_by"
_CONFIGS = {"config": "config_id", "runner_up": "runner_up_id", "today": "today_id"}
_COLUMNS = [field.name for field in fields(Pick) if field.name in db.Decisions.c]


@dataclass(frozen=True)
class Pruned:
    """Number of results and trials that went, and of results that stayed."""

    results: int
    trials: int
    remaining: int


class Store(Merging, Framing):
    """An open results database. A context manager; one thread at a time."""

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
            values |= {name: getattr(study, name) for name in (*OF_STUDY, "newest")}
            picks.append(Pick(is_complete=study.complete, **values))
        return picks

    def _evidence(self) -> str:
        """Return a text that changes with the rows that decide picks."""
        tables = (db.Results, db.StudyRuns, db.Studies, db.Calibrations)
        sums = (select(func.count(), func.coalesce(func.sum(table.c.crc), 0)).select_from(table) for table in tables)
        return " ".join(f"{n}/{int(total):x}" for query in sums for n, total in self._connection.execute(query))

    def prune(self, picks: Collection[tuple[str, NamedInts]]) -> Pruned:
        """Remove samples, telemetry, coarse trials, and results that no pick could rest on, with their machine code.

        Args:
            picks: Each kernel with each config that is picked anywhere for it. Without these the fallback row of a
                table, and its rule for keys without a row, would change.
        """
        pruned = self._prune(set(picks))
        self.execute_alone("VACUUM")
        return pruned

    @writes
    def _prune(self, picks: set[tuple[str, NamedInts]]) -> Pruned:
        connection, results = self._connection, db.Results.c
        names, seen, gone = Names(connection), dict[int, int](), set[int]()
        confirmed = set(connection.scalars(select(db.Trials.c.result_id).where(db.Trials.c.stage != db.COARSE)))
        query = select(results.id, results.study_id, results.config_id, results.coarse_us)
        query = query.where(results.final_us.is_(None)).order_by(results.study_id, results.coarse_us)
        for id, study_id, config_id, coarse_us in connection.execute(query):
            study, config = names.studies[study_id], names.configs[config_id]
            if study.kind not in (Kind.MEASURED, Kind.SIMULATED) or study.version is None or id in confirmed:
                continue
            place = seen[study_id] = seen.get(study_id, 0) + (coarse_us is not None)
            is_picked = config == study.default or (study.version.kernel, config) in picks
            if coarse_us is None or not (place <= FASTEST or is_picked):
                gone.add(id)
        connection.execute(delete(db.TrialDetails))
        removed = connection.execute(delete(db.Trials).where(db.Trials.c.stage == db.COARSE)).rowcount
        launches = select(db.Studies.c.problem_id, db.Studies.c.version_id, results.config_id).join(db.Studies)
        before = {tuple(launch) for launch in connection.execute(launches)}
        self._delete(db.Results, gone)
        for launch in before - {tuple(launch) for launch in connection.execute(launches)}:
            of_launch = (column == id for column, id in zip(db.Programs.primary_key, launch, strict=False))
            connection.execute(delete(db.Programs).where(*of_launch))
        self._update_studies(names.studies)
        remaining = connection.scalar(select(func.count()).select_from(db.Results)) or 0
        return Pruned(len(gone), removed, remaining)
