"""The events of a sweep, for whoever shows them."""

from __future__ import annotations

from dataclasses import dataclass

from fp8tune.choose.decision import MeasuringPlan
from fp8tune.measure.engine import CompileProgress
from fp8tune.records import Device, Problem, Row


@dataclass(frozen=True)
class Started:
    """First event: what will be done."""

    device: Device
    planned: int
    stored: int
    """Trials that already have a row."""


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
    """Whether the protocol's numbers come from this device's calibration, not from the defaults."""


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


Event = Started | CompileProgress | Added | FinalsStarted | NoFinals | TrialDone | Finished
