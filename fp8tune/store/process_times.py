"""What finals timed, one value a worker process, and which finals count.

Finals count once they ended (:meth:`fp8tune.store.results.Store.end_finals`). Of those of one problem, kernel version
and device, the sweep that started last counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from sqlalchemy import Connection, func, select

from fp8tune.records import FinalsRun, NamedInts, ProcessTimes, Subject
from fp8tune.store.columns import LARGEST_NUMBER
from fp8tune.store.reading import candidates_of, packed_of
from fp8tune.store.schema import Candidates, Configs, Finals, Sweeps, Trials, Workers
from fp8tune.store.summaries import Block, packed_summaries, summaries
from fp8tune.store.unreadable import ById, MissingRowError, packed_pools, readable

Counted = Mapping[tuple[int, int, int], tuple[int, FinalsRun]]
"""The ids of a problem, a kernel version and a device -> the sweep's id and its finals."""


@dataclass(frozen=True)
class Timed:
    """What one process timed of one candidate in one sweep's finals."""

    stage: str
    process: str
    blocks: tuple[Block, ...]

    def of_run(self, run: FinalsRun) -> ProcessTimes:
        """As a part of these finals."""
        return ProcessTimes(run, self.process, self.blocks)


def counted_finals(connection: Connection) -> Counted:
    """All finals that count. Few: one a problem."""
    query = select(*Finals.c, Sweeps.c.uid, Sweeps.c.started_at).join(Sweeps, Sweeps.c.id == Finals.c.sweep_id)
    return {
        (row.problem_id, row.version_id, row.device_id): (
            row.sweep_id,
            FinalsRun(row.uid, row.tie_band, row.keep_band, row.floor_us),
        )
        for row in readable(connection, query.order_by(Sweeps.c.started_at, Sweeps.c.uid))
    }


def of_candidate(
    finals: Mapping[tuple[str, int, int], tuple[Block, ...]], sweep: int, run: FinalsRun, processes: Mapping[int, str]
) -> dict[str, tuple[ProcessTimes, ...]]:
    """Stage -> what the processes of one sweep's finals timed of a candidate, by the process's name.

    ``finals`` as in :class:`fp8tune.store.summaries.Summary`; ``processes`` by the ids of workers.
    """
    found: dict[str, list[ProcessTimes]] = {}
    for (stage, of, worker), blocks in finals.items():
        if of == sweep:
            with contextlib.suppress(MissingRowError):
                found.setdefault(stage, []).append(ProcessTimes(run, processes[worker], blocks))
    return {stage: tuple(sorted(times, key=attrgetter("process"))) for stage, times in found.items()}


def process_names(connection: Connection) -> Mapping[int, str]:
    """The names of all workers by id. Few beside the trials."""
    return ById(connection, Workers, readable(connection, select(Workers.c.id, Workers.c.process)))


def of_sweep(connection: Connection, subject: Subject, sweep: int) -> dict[NamedInts, list[Timed]]:
    """Config -> what one sweep's finals of a problem timed so far, ended or not."""
    mine = candidates_of(subject)
    configs = {row.id: row.items or NamedInts() for row in readable(connection, mine.add_columns(Configs.c["items"]))}
    timed = list(summaries(connection, mine))
    for pool in packed_pools(connection, packed_of(subject)):
        ids = dict(pool.rows(Candidates, ("id", "config_id")))
        items = select(Configs.c.id, Configs.c["items"]).where(Configs.c.id.in_(set(ids.values())))
        by_id = {row.id: row.items or NamedInts() for row in readable(connection, items)}
        configs |= {candidate: by_id[config] for candidate, config in ids.items() if config in by_id}
        timed += packed_summaries(pool)
    names = process_names(connection)
    found: dict[NamedInts, list[Timed]] = {}
    for candidate, summary in timed:
        for (stage, of, worker), blocks in sorted(summary.finals.items()):
            if of == sweep and candidate in configs:
                with contextlib.suppress(MissingRowError):
                    found.setdefault(configs[candidate], []).append(Timed(stage, names[worker], blocks))
    return found


def tick_us(connection: Connection, subject: Subject, sweep: int) -> float | None:
    """The smallest step between two samples of a block in one sweep's finals of a problem; None where unknown."""
    mine = (Trials.c.candidate_id.in_(candidates_of(subject)), Trials.c.sweep_id == sweep, Trials.c.stage != "screen")
    is_number = Trials.c.tick_us.between(0, LARGEST_NUMBER)  # no text is
    ticks: list[float | None] = [connection.scalar(select(func.min(Trials.c.tick_us)).where(*mine, is_number))]
    for pool in packed_pools(connection, packed_of(subject)):
        ticks += [
            tick if of == sweep and stage != "screen" else None
            for tick, of, stage in pool.rows(Trials, ("tick_us", "sweep_id", "stage"))
        ]
    return min((tick for tick in ticks if tick is not None), default=None)
