"""What a worker tells whoever shows it, beside the events of the sweep it runs (:mod:`fp8tune.sweep.events`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8tune.records import Device
from fp8tune.store.units import Unit
from fp8tune.sweep import events


@dataclass(frozen=True)
class WorkerStarted:
    """First event."""

    worker: str
    """As ``fp8tune queue`` shows it."""
    device: Device


@dataclass(frozen=True)
class Preparing:
    """The GPU is looked at, and calibrated where it has to be, before its first unit."""


@dataclass(frozen=True)
class Notice:
    """Something about the GPU that the user should know."""

    text: str


@dataclass(frozen=True)
class UnitTaken:
    """The worker has a unit."""

    unit: Unit
    attempt: int


@dataclass(frozen=True)
class UnitDone:
    """A unit is done, and nobody else did it."""

    unit: Unit
    seconds: float
    trials: int
    reason: str = ""
    """What was found: that no config is right on some of its problems. Mostly empty."""


@dataclass(frozen=True)
class UnitFailed:
    """A unit could not be done here; ``is_final`` if nobody tries it again."""

    unit: Unit
    reason: str
    is_final: bool


@dataclass(frozen=True)
class UnitReturned:
    """A unit waits again: the time was up, or another worker has it by now."""

    unit: Unit
    reason: str


@dataclass(frozen=True)
class SweepRefused:
    """This worker leaves a sweep's units alone: it has other code, or lacks files."""

    sweep_key: str
    reason: str


@dataclass(frozen=True)
class Waiting:
    """Nothing waits for this device now; running units of others may come back."""

    running: int


@dataclass(frozen=True)
class WorkerEnded:
    """Last event."""

    done: int
    failed: int
    reason: str = ""
    """Why it ended before the queue was empty; empty where it did not."""
    waiting: int = 0
    """Units that wait for this device name."""
    left_s: float | None = None
    """About what these take on one device; None where nothing of them was done yet."""
    is_in_vain: bool = False
    """Whether it ended because it cannot do what waits: nothing to do with a time budget."""
    findings: int = 0
    """Of the units done, those with a problem that no config is right on."""


OwnEvent = (
    WorkerStarted
    | Preparing
    | Notice
    | UnitTaken
    | UnitDone
    | UnitFailed
    | UnitReturned
    | SweepRefused
    | Waiting
    | WorkerEnded
)
"""About units, not about a trial of one."""

WorkerEvent = OwnEvent | events.Event

NAMES: Mapping[type[OwnEvent], str] = {
    WorkerStarted: "started",
    Preparing: "preparing",
    Notice: "notice",
    UnitTaken: "taken",
    UnitDone: "done",
    UnitFailed: "failed",
    UnitReturned: "given back",
    SweepRefused: "refused",
    Waiting: "waiting",
    WorkerEnded: "ended",
}
"""What programs call them."""
