"""A sweep from outside: the request that goes in, and the events that come out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fp8tune.choose.decision import MeasuringPlan
from fp8tune.measure.laboratory import TRIAL_TIMEOUT_S, Batch, CompileProgress, Laboratory
from fp8tune.records import Device, NamedInts, Outcome, Problem, Row, Subject

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One sweep as asked for."""

    batches: tuple[Batch, ...]
    laboratory: Laboratory
    key: str
    """Names the same request again, so that a killed sweep continues."""
    command: str = ""
    commit: str = ""
    seed: int = 0
    again: bool = False
    retry_failed: bool = False
    finals: bool = False
    """Whether the screen's finalists are timed again, in fresh processes."""
    incumbents: Mapping[Problem, NamedInts] = field(default_factory=dict)
    """What the committed table holds for the problems: always among the finalists."""
    fallbacks: Mapping[str, NamedInts] = field(default_factory=dict)
    """What it holds for any other shape, by kernel: timed in every round, for its place hangs on every problem."""
    time_budget_s: float | None = None
    trial_timeout_s: float = TRIAL_TIMEOUT_S

    def subject(self, batch: Batch) -> Subject:
        """What the database knows a batch by."""
        return Subject(batch.version, self.laboratory.device, self.laboratory.kind, batch.problem)

    def row(
        self,
        batch: Batch,
        config: NamedInts,
        outcome: Outcome,
        *,
        process: str,
        stage: str = "screen",
        round: int = 0,
        position: int = 0,
    ) -> Row:
        """One trial of a batch with all that is kept of it."""
        return Row(
            problem=batch.problem,
            config=config,
            device=self.laboratory.device,
            kind=self.laboratory.kind,
            outcome=outcome,
            version=batch.version,
            lookup_key=batch.lookup_key,
            bytes_moved=batch.bytes_moved,
            commit=self.commit,
            stage=stage,
            round=round,
            process=process,
            position=position,
        )

    def permuted(self, items: Iterable[T], *place: object) -> list[T]:
        """A permutation that is the same for the same seed and place: neighbours and drift hit every config."""
        shuffled = list(items)
        random.Random(" ".join(map(str, (self.seed, *place)))).shuffle(shuffled)
        return shuffled


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
