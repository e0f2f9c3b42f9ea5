"""Pruning: a database small enough for git, with all the evidence that picks rest on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import delete, func, select

from fp8tune.records import Kind, NamedInts
from fp8tune.store import schema as db
from fp8tune.store.database import writes
from fp8tune.store.rows import Names
from fp8tune.store.trials import chunks
from fp8tune.store.write import Writing

FASTEST = 28
"""Coarse results of each study that stay besides finals and configs that are picked anywhere for the kernel.

With 20 the shipped table got another row by which keys without a row are looked up; with 28 it is the same.
"""


@dataclass(frozen=True)
class Pruned:
    """Number of results and trials that went, and of results that stayed."""

    results: int
    trials: int
    remaining: int


class Pruning(Writing):
    """Method that prunes."""

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
        for ids in chunks(gone):
            connection.execute(delete(db.Results).where(results.id.in_(ids)))
        for launch in before - {tuple(launch) for launch in connection.execute(launches)}:
            of_launch = (column == id for column, id in zip(db.Programs.primary_key, launch, strict=False))
            connection.execute(delete(db.Programs).where(*of_launch))
        self._update_studies(names.studies)
        remaining = connection.scalar(select(func.count()).select_from(db.Results)) or 0
        return Pruned(len(gone), removed, remaining)
