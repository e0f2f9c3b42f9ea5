"""Stored trials of a result, and the summary that outlives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, geometric_mean, median
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from fp8tune.records import AGREES, ClockLimits, Facts, Outcome, Status
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


def read_trials(
    connection: Connection, results: Iterable[int], *, sweep: int | None = None, stage: int | None = None
) -> Iterator[Trial]:
    """Yield the trials of results, oldest first: of each sweep and process in the order they were stored."""
    c, processes, runs, sweeps = db.Trials.c, db.Processes.c, db.StudyRuns.c, db.Sweeps.c
    same_run = (runs.study_id == db.Results.c.study_id) & (runs.sweep_id == processes.sweep_id)
    query = (
        select(*(c[name] for name in Trial._fields[:7]), processes.name, processes.sweep_id, sweeps.started_at)
        .add_columns(runs.reference, *(sweeps[name] for name in db.LIMITS))
        .join_from(db.Trials, db.Processes, processes.id == c.process_id)
        .join(db.Sweeps, sweeps.id == processes.sweep_id)
        .join(db.Results, db.Results.c.id == c.result_id)
        .outerjoin(db.StudyRuns, same_run)
        .order_by(processes.started_at, processes.id, c.stage, c.round, c.position)
    )
    query = query if sweep is None else query.where(processes.sweep_id == sweep)
    query = query if stage is None else query.where(c.stage == stage)
    for ids in chunks(results):
        yield from map(Trial._make, connection.execute(query.where(c.result_id.in_(ids))).all())


def last_status(trials: Sequence[Trial]) -> Status:
    """Return the outcome of a config: wrong if that stands, otherwise the outcome of its last trial.

    Trials that the newest reference checked count, and since its first one those of an unknown reference. Under one
    reference, wrong once is wrong until a later sweep runs the same round of the coarse pass again; if it was wrong in
    a confirmation, the first round.
    """
    noted = [place for place, trial in enumerate(trials) if trial.reference]
    if noted:
        newest = trials[noted[-1]].reference
        since = next(place for place in noted if trials[place].reference == newest)
        trials = [t for n, t in enumerate(trials) if t.reference == newest or (not t.reference and n >= since)]
    for place, trial in enumerate(trials):
        round = trial.round if trial.stage == db.COARSE else 0
        if trial.status == Status.WRONG and not any(
            (later.stage, later.status, later.round) == (db.COARSE, Status.OK, round)
            and later.sweep_id != trial.sweep_id
            for later in trials[place + 1 :]
        ):
            return Status.WRONG
    return Status(next((t.status for t in reversed(trials) if t.status != Status.WRONG), Status.WRONG))


def outcome_of(trials: Sequence[Trial], row: Any) -> Outcome:
    """Return the outcome of a config from its trials, else from the summary in the row of its result."""
    facts = Facts(*(getattr(row, name) for name in db.FACTS))
    if not trials:
        return Outcome(Status(row.status), row.coarse_us, facts=facts)
    status = last_status(trials)
    deciding = [trial for trial in trials if trial.status == status]
    times_us = [trial.time_us for trial in deciding if trial.time_us is not None]
    time_us = median(times_us) if times_us and status is Status.OK else None
    # blocks that are timed without a check say nothing of what the first config leaves unwritten
    remarks = [trial.reason for trial in deciding if trial.reason.startswith(AGREES)]
    return Outcome(status, time_us, remarks[-1] if remarks else deciding[-1].reason, facts=facts)


def summary(trials: Sequence[Trial], *, is_published: bool, limits: ClockLimits = ClockLimits()) -> dict[str, Any]:
    """Return what a result keeps of its trials, with times at ``limits``; a pruned one keeps what it has."""
    values: dict[str, Any] = {"status": str(last_status(trials))} if trials else {}
    comparable = [trial for trial in trials if trial.is_comparable(limits)]
    if len(comparable) < len(trials):
        values |= {"coarse_us": None, "coarse_processes": 0, "final_us": None}
    coarse = [trial for trial in comparable if trial.stage == db.COARSE and trial.time_us is not None]
    finals = [trial for trial in comparable if trial.stage == db.FINAL and trial.time_us is not None]
    # One time a process, or one in all if one sweep's worker was replaced; figures of publications are not one run.
    is_one = not is_published and len({trial.sweep_id for trial in coarse}) == 1
    if times_us := _grouped(coarse, lambda trial: 0 if is_one else trial.process_id):
        values |= {"coarse_us": median(map(_middle_mean, times_us)), "coarse_processes": len(times_us)}
    newest = max(((trial.started_at, trial.sweep_id) for trial in finals), default=None)
    finals = [trial for trial in finals if (trial.started_at, trial.sweep_id) == newest]
    if times_us := _grouped(finals, lambda trial: trial.process_id):
        values["final_us"] = geometric_mean(map(trimmed_mean, times_us))
    return values


def _grouped(trials: Iterable[Trial], key: Callable[[Trial], int]) -> list[list[float]]:
    groups: dict[int, list[Any]] = {}
    for trial in trials:
        groups.setdefault(key(trial), []).append(trial.time_us)
    return list(groups.values())


def _middle_mean(times_us: Iterable[float]) -> float:
    """Return the mean without the least and the largest time, to 1e-6 us: the last digits depend on the order."""
    ordered = sorted(times_us)
    return round(1e6 * fmean(ordered[1:-1] if len(ordered) > 2 else ordered)) / 1e6


def chunks(ids: Iterable[int]) -> list[list[int]]:
    """Return sorted ids in lists that one statement can take."""
    ordered = sorted(ids)
    return [ordered[start : start + _CHUNK] for start in range(0, len(ordered), _CHUNK)]
