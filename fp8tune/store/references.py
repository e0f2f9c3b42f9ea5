"""Which of a config's trials say whether its bytes are right: references change, and a round may be run again.

Trials checked by the newest reference (:data:`fp8tune.store.schema.ReferencesChecked`) count. Under one reference,
wrong once is wrong until a later sweep runs the same round of the screen again (``--retry-failed``, ``--again``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from sqlalchemy import Connection, select

from fp8tune.records import Status
from fp8tune.store.schema import ReferencesChecked

References = Mapping[tuple[int, int], str]
"""The ids of a sweep and a kernel version -> the hash of the reference."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one trial ended, and by which reference."""

    status: Status
    created_at: float
    stage: str
    round: int
    sweep: int
    reference: str = ""
    """Empty where nobody noted it."""


def references(connection: Connection) -> References:
    """What every sweep noted. Few: one a sweep and kernel version."""
    query = select(ReferencesChecked.c.sweep_id, ReferencesChecked.c.version_id, ReferencesChecked.c.reference)
    return {(row.sweep_id, row.version_id): row.reference for row in connection.execute(query)}


def is_outdated(status: Status, reference: str, today: str) -> bool:
    """Whether a trial says nothing of the bytes any more. An unknown reference is believed where it found no fault.

    A ``compile_error`` is whatever raised before a launch, the inputs or the reference among it.
    """
    if status not in (Status.OK, Status.UNTIMED, Status.WRONG, Status.COMPILE_ERROR):
        return False
    return reference != today and (bool(reference) or status is Status.WRONG)


def last_status(trials: Sequence[Ended]) -> Status:
    """What became of a candidate: wrong where that stands, otherwise as its last trial ended."""
    counted = sorted(_by_newest_reference(trials), key=attrgetter("created_at"))
    if any(trial.status is Status.WRONG and not _was_run_again(trial, counted) for trial in counted):
        return Status.WRONG
    return last_but_wrong({trial.status: trial.created_at for trial in counted})


def last_but_wrong(newest: Mapping[Status, float]) -> Status:
    """Of a candidate that nothing stands against, from when each status was last stored."""
    return max(
        (status for status in newest if status is not Status.WRONG),
        key=lambda status: (newest[status], status is not Status.OK, status),
    )


def _by_newest_reference(trials: Sequence[Ended]) -> Sequence[Ended]:
    """Trials by the newest reference that was noted, and by an unknown one since then."""
    noted = [trial for trial in trials if trial.reference]
    if not noted:
        return trials
    newest = max(noted, key=lambda trial: (trial.created_at, trial.reference)).reference
    since = min(trial.created_at for trial in noted if trial.reference == newest)
    return [one for one in trials if one.reference == newest or (not one.reference and one.created_at >= since)]


def _was_run_again(wrong: Ended, trials: Sequence[Ended]) -> bool:
    return wrong.stage == "screen" and any(
        trial.status is Status.OK
        and (trial.stage, trial.round) == (wrong.stage, wrong.round)
        and trial.sweep != wrong.sweep
        and trial.created_at > wrong.created_at
        for trial in trials
    )
