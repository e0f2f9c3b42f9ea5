"""The events of a sweep, for whoever shows them."""

from __future__ import annotations

from dataclasses import dataclass

from fp8tune.measure.engine import CompileProgress
from fp8tune.records import Device, Kind, Problem, Row


@dataclass(frozen=True)
class Started:
    """First event."""

    device: Device
    kind: Kind  # whether configs are timed, checked or compiled
    problems: int  # number of problem sizes
    configs: int  # of all of them, pruned ones included


@dataclass(frozen=True)
class RoundStarted:
    """A round begins in the coarse pass of a problem size."""

    problem: Problem
    index: int  # number of the problem size, from 0
    round: int  # from 0, the round that has every config
    rounds: int
    trials: int  # of the round, stored and pruned ones included


@dataclass(frozen=True)
class TrialDone:
    """A trial has a row, now or from an earlier run."""

    row: Row
    from_database: bool


@dataclass(frozen=True)
class ConfirmationStarted:
    """Finalists are timed in fresh processes until the next decision."""

    problems: int  # number of problem sizes that are not decided
    processes: int  # number of processes that have timed each of them after this
    trials: int  # new ones
    decision: int  # number of the decision, from 1


@dataclass(frozen=True)
class ConfirmationSkipped:
    """A problem size cannot be confirmed in this sweep."""

    problem: Problem
    reason: str


@dataclass(frozen=True)
class SizeDone:
    """End of all work on a problem size."""

    problem: Problem


@dataclass(frozen=True)
class ChildDied:
    """The process of a GPU has ended by itself."""

    gpu: str
    reason: str
    sizes: int  # that it had taken and not done: others do them
    is_replaced: bool


@dataclass(frozen=True)
class Finished:
    """Last event of a sweep that was not interrupted."""

    seconds: float
    left_out: int = 0  # trials that a time budget left out
    is_whole: bool = True  # nothing is left to do for the same command
    seen: int = 0  # configs of a search that were tried, in this sweep or before
    grid: int = 0  # configs of its grids that are not pruned; 0 if all grids fitted the time budget

    def joined(self, end: Finished) -> Finished:
        """Return the end of two sweeps that ran beside each other."""
        sums = (self.left_out + end.left_out, self.is_whole and end.is_whole, self.seen + end.seen)
        return Finished(max(self.seconds, end.seconds), *sums, self.grid + end.grid)


Event = (
    Started
    | RoundStarted
    | CompileProgress
    | TrialDone
    | ConfirmationStarted
    | ConfirmationSkipped
    | SizeDone
    | ChildDied
    | Finished
)
