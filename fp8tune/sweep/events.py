"""The events of a sweep, for whoever shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8tune.measure.engine import CompileProgress
from fp8tune.records import Device, Kind, Problem, Row
from fp8tune.stats.decide import MeasuringPlan


@dataclass(frozen=True)
class Ahead:
    """What a sweep will do, as far as it is known when it begins."""

    kind: Kind = Kind.MEASURED
    """Whether configs are timed, checked or compiled."""
    trials: Mapping[Problem, int] = field(default_factory=dict)
    """Of each problem's first round: configs that have no row yet and are not pruned."""
    rounds: int = 1
    """Of the screen."""
    judged_after: tuple[int, ...] = ()
    """Processes after which a problem's finals are judged; empty where there are no finals."""
    blocks: int = 0
    """Of each finalist in each process of the finals."""
    finalists: int = 0
    """How many go to the finals at most, but for configs that always do."""
    fresh_s: float = 0.0
    """About what a fresh process takes before it times anything, in seconds."""
    budget_s: float | None = None
    """Seconds that the time budget leaves; None without one."""


@dataclass(frozen=True)
class Started:
    """First event: what will be done."""

    device: Device
    planned: int
    stored: int
    """Trials that already have a row."""
    ahead: Ahead = Ahead()


@dataclass(frozen=True)
class RoundStarted:
    """A round of a problem's screen begins."""

    problem: Problem
    round: int
    """Counted from 0, the one that has every config."""
    rounds: int
    trials: int
    """Those of the round that have no row yet and are not pruned."""


@dataclass(frozen=True)
class FinalsAhead:
    """What the finals of a problem still take: known once it is screened, and again with what they show."""

    problem: Problem
    arms: int
    """Timed in each process: the finalists and the default's second name; 0 where nothing is left to time."""
    done: int
    """Processes that have timed them."""
    likely: int | None = None
    """Processes in all if those to come turn out as those so far; None before enough of them are there."""


@dataclass(frozen=True)
class TrialDone:
    """A trial has a row, now or from before."""

    row: Row
    from_database: bool


@dataclass(frozen=True)
class Added:
    """So many trials more than were announced: a later round of the screen, or finals that are in the database."""

    trials: int


@dataclass(frozen=True)
class FinalsStarted:
    """So many problems go into finals, in so many fresh processes in all: so many trials more than were announced."""

    problems: int
    processes: int
    trials: int
    protocol: MeasuringPlan
    is_calibrated: bool
    """Whether the protocol's numbers come from a calibration of this device or its mates, not from the defaults."""
    decision: int = 1
    """The how manieth judgement these processes are for."""
    decisions: int = 1
    """How many there may be."""


@dataclass(frozen=True)
class NoFinals:
    """A problem has no finals in this sweep."""

    problem: Problem
    reason: str


@dataclass(frozen=True)
class Finished:
    """Last event of a sweep that was not interrupted."""

    trials: int
    seconds: float
    left_out: int = 0
    """Trials that a time budget left out."""
    is_whole: bool = True
    """Whether every problem has all that was wanted of it, so that the sweep is over for good."""


Event = Started | RoundStarted | CompileProgress | Added | FinalsAhead | FinalsStarted | NoFinals | TrialDone | Finished
