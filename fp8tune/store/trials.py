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
        return self.time_us is None or not limits.difference(ClockLimits(*self[-3:]))

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
    trials, processes = db.Trials.c, db.Processes.c
    columns = [trials[name] for name in Trial._fields[:7]]
    limits = [db.Sweeps.c[name] for name in vars(ClockLimits())]
    limits = [db.Sweeps.c[name] for name in vars(ClockLimits())]
    same_study = db.StudyRuns.c.study_id == db.Results.c.study_id
    query = (
        select(*columns, processes.name, processes.sweep_id, db.Sweeps.c.started_at, db.StudyRuns.c.reference, *limits)
        .join_from(db.Trials, db.Processes, processes.id == trials.process_id)
        .join(db.Sweeps, db.Sweeps.c.id == processes.sweep_id)
        .join(db.Results, db.Results.c.id == trials.result_id)
        .outerjoin(db.StudyRuns, same_study & (db.StudyRuns.c.sweep_id == processes.sweep_id))
        .order_by(processes.started_at, processes.id, trials.stage, trials.round, trials.position)
    )
    places = {"stage": trials.stage, "round": trials.round, "sweep": processes.sweep_id}
    query = query.where(*(places[name] == value for name, value in values.items() if value is not None))
    for ids in chunks(results):
        yield from map(Trial._make, connection.execute(query.where(trials.result_id.in_(ids))).all())


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
    """Return what a result keeps of its trials, with times at ``limits``.

    A pruned result without trials keeps what it has.
    """
    values: dict[str, Any] = {"status": str(last_status(trials))} if trials else {}
    if not all(trial.is_comparable(limits) for trial in trials):
        values |= {"coarse_us": None, "coarse_processes": 0, "final_us": None}
        trials = [trial for trial in trials if trial.is_comparable(limits)]
    if coarse := _coarse_times(trials, is_published=is_published):
        values |= {"coarse_us": median(coarse), "coarse_processes": len(coarse)}
    finals = [trial for trial in trials if trial.stage == db.FINAL and trial.time_us is not None]
    newest = max(((t.started_at, t.sweep_id) for t in finals), default=None)
    by_process: dict[int, list[float]] = {}
    for t in finals:
        if (t.started_at, t.sweep_id) == newest and t.time_us is not None:
            by_process.setdefault(t.process_id, []).append(t.time_us)
    if by_process:
        values["final_us"] = geometric_mean(map(trimmed_mean, by_process.values()))
    return values


def _coarse_times(trials: Iterable[Trial], *, is_published: bool) -> list[float]:
    """Return the times of the coarse pass: one a process, or one in all if one sweep's worker was replaced."""
    sweeps, by_process = set(), dict[int, list[float]]()
    for trial in trials:
        if trial.stage == db.COARSE and trial.time_us is not None:
            sweeps.add(trial.sweep_id)
            by_process.setdefault(trial.process_id, []).append(trial.time_us)
    if len(by_process) > 1 == len(sweeps) and not is_published:  # figures of publications are not one run
        by_process = {0: list(itertools.chain(*by_process.values()))}
    return sorted(_middle_mean(times) for times in by_process.values())


def _middle_mean(times_us: Iterable[float]) -> float:
    """Return the mean without the least and the largest time, to 1e-6 us: the last digits depend on the order."""
    ordered = sorted(times_us)
    return round(1e6 * fmean(ordered[1:-1] if len(ordered) > 2 else ordered)) / 1e6


def chunks(ids: Iterable[int]) -> Iterator[list[int]]:
    """Yield sorted ids in lists that one statement can take."""
    remaining = iter(sorted(ids))
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        yield chunk
