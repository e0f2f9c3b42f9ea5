"""Stored trials of a result, and the summary that outlives them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, geometric_mean, median
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from fp8tune.records import ClockLimits, Status
from fp8tune.stats.means import trimmed_mean
from fp8tune.store import schema as db

STAGES = {"screen": db.COARSE, "final": db.FINAL, "duplicate": db.CONTROL}
"""Stage of a row -> its number in the database."""

LIMITS = tuple(ClockLimits.__dataclass_fields__)

_CHUNK = 10_000  # ids in one statement: SQLite takes 32,766 values, PostgreSQL 65,535


class Trial(NamedTuple):
    """A stored trial, with the sweep and the reference that decide whether it counts."""

    result_id: int
    stage: int
    process_id: int
    round: int
    status: str
    time_us: float | None
    reason: str
    process: str
    sweep_id: int
    started_at: float
    reference: str
    """Hash of the reference that checked it; empty if unknown."""
    sm_clock_limit_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None

    def is_comparable(self, limits: ClockLimits) -> bool:
        """Return False for a time at other clock or power limits."""
        is_unknown = self.time_us is None or self[-3:] == (None, None, None)
        return is_unknown or not limits.difference(ClockLimits(*self[-3:]))

    @property
    def is_block(self) -> bool:
        """True for a timed block of the finals."""
        return self.stage != db.COARSE and self.time_us is not None

    def is_outdated(self, today: str) -> bool:
        """Return True if the trial says nothing of the output any more, because today's reference is another.

        An unknown reference is believed where it found no fault. A compile error is whatever raised before a launch.
        """
        if not today or self.status not in (Status.OK, Status.UNTIMED, Status.WRONG, Status.COMPILE_ERROR):
            return False
        return self.reference != today and (bool(self.reference) or self.status == Status.WRONG)


def read_trials(connection: Connection, results: Iterable[int], **values: Any) -> Iterator[Trial]:
    """Yield the trials of results, oldest first: of each sweep and process in the order they were stored."""
    c, processes = db.Trials.c, db.Processes.c
    same_run = (db.StudyRuns.c.study_id == db.Results.c.study_id) & (db.StudyRuns.c.sweep_id == processes.sweep_id)
    query = (
        select(*(c[name] for name in Trial._fields[:7]), processes.name, processes.sweep_id, db.Sweeps.c.started_at)
        .add_columns(db.StudyRuns.c.reference, *(db.Sweeps.c[name] for name in LIMITS))
        .join_from(db.Trials, db.Processes, processes.id == c.process_id)
        .join(db.Sweeps, db.Sweeps.c.id == processes.sweep_id)
        .join(db.Results, db.Results.c.id == c.result_id)
        .outerjoin(db.StudyRuns, same_run)
        .order_by(processes.started_at, processes.id, c.stage, c.round, c.position)
    )
    places = {"stage": c.stage, "sweep": processes.sweep_id}
    query = query.where(*(places[name] == value for name, value in values.items() if value is not None))
    for ids in chunks(results):
        yield from map(Trial._make, connection.execute(query.where(c.result_id.in_(ids))).all())


def last_status(trials: Sequence[Trial]) -> Status:
    """Return the outcome of a config: wrong if that stands, otherwise the outcome of its last trial.

    Trials that the newest reference checked count, and since its first one those of an unknown reference. Under one
    reference, wrong once is wrong until a later sweep runs the same round of the coarse pass again.
    """
    noted = [place for place, trial in enumerate(trials) if trial.reference]
    if noted:
        newest = trials[noted[-1]].reference
        since = next(place for place in noted if trials[place].reference == newest)
        trials = [t for n, t in enumerate(trials) if t.reference == newest or (not t.reference and n >= since)]
    for place, trial in enumerate(trials):
        if trial.status == Status.WRONG and not any(
            trial.stage == later.stage == db.COARSE
            and (later.status, later.round) == (Status.OK, trial.round)
            and later.sweep_id != trial.sweep_id
            for later in trials[place + 1 :]
        ):
            return Status.WRONG
    return Status(next((t.status for t in reversed(trials) if t.status != Status.WRONG), Status.WRONG))


def summary(trials: Sequence[Trial], *, is_published: bool, limits: ClockLimits = ClockLimits()) -> dict[str, Any]:
    """Return what a result keeps of its trials, with times at ``limits``; a pruned one keeps what it has."""
    values: dict[str, Any] = {"status": str(last_status(trials))} if trials else {}
    comparable = [trial for trial in trials if trial.is_comparable(limits)]
    if len(comparable) < len(trials):
        values |= {"coarse_us": None, "coarse_processes": 0, "final_us": None}
    timed = [(trial, trial.time_us) for trial in comparable if trial.time_us is not None]
    # One time a process, or one in all if one sweep's worker was replaced; figures of publications are not one run.
    coarse = [(trial, time_us) for trial, time_us in timed if trial.stage == db.COARSE]
    is_one = not is_published and len({trial.sweep_id for trial, _ in coarse}) == 1
    by_process: dict[int, list[float]] = {}
    for trial, time_us in coarse:
        by_process.setdefault(0 if is_one else trial.process_id, []).append(time_us)
    if by_process:
        values |= {"coarse_us": median(map(_middle_mean, by_process.values())), "coarse_processes": len(by_process)}
    finals = [(trial, time_us) for trial, time_us in timed if trial.stage == db.FINAL]
    newest = max(((trial.started_at, trial.sweep_id) for trial, _ in finals), default=None)
    by_process = {}
    for trial, time_us in finals:
        if (trial.started_at, trial.sweep_id) == newest:
            by_process.setdefault(trial.process_id, []).append(time_us)
    if by_process:
        values["final_us"] = geometric_mean(map(trimmed_mean, by_process.values()))
    return values


def _middle_mean(times_us: Iterable[float]) -> float:
    """Return the mean without the least and the largest time, to 1e-6 us: the last digits depend on the order."""
    ordered = sorted(times_us)
    return round(1e6 * fmean(ordered[1:-1] if len(ordered) > 2 else ordered)) / 1e6


def chunks(ids: Iterable[int]) -> Iterator[list[int]]:
    """Yield sorted ids in lists that one statement can take."""
    remaining = iter(sorted(ids))
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        yield chunk
