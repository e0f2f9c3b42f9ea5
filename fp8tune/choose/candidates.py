"""Everything that competes for one problem on one device, and the pick among it.

Where there were finals they decide (:mod:`fp8tune.choose.decision`); the screen alone gives a ``quick`` pick.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fp8tune.ceiling import Bound, CeilingShare, ceiling_share, gb_per_s, is_cached
from fp8tune.choose.decision import (
    Decision,
    Kept,
    MeasuringPlan,
    PickVerdict,
    decide_finals,
    noise_floor,
    unproven,
)
from fp8tune.choose.pairs import canonical_order
from fp8tune.records import Device, Evidence, Kind, NamedInts, Problem, is_recorded

TIE_BAND = MeasuringPlan().tie_band
"""Screened configs this close to the best are as good as the best: repeated sweeps swap them at random."""

KEEP_BAND = MeasuringPlan().keep_band
"""What the committed table holds stays until another is better by more than this; in a screen by its times alone."""


@dataclass(frozen=True)
class Winner:
    """The pick for one problem on one device. Times in microseconds."""

    evidence: Evidence
    """All that is stored of the pick."""
    decision: Decision
    noise_floor: float | None = None
    """How far the declared default was from itself under a second name, as a share: no smaller difference counts."""

    @property
    def problem(self) -> Problem:
        """What it is the best of."""
        return self.evidence.problem

    @property
    def device(self) -> Device:
        """What it ran on; of a published row, what the source names."""
        return self.evidence.device

    @property
    def kind(self) -> Kind:
        """Where its time comes from."""
        return self.evidence.kind

    @property
    def config(self) -> NamedInts | None:
        """None where the only rows are published ones whose source names no config."""
        return self.evidence.config

    @property
    def time_us(self) -> float:
        """Of finals, else of the screen."""
        return self.decision.time_us

    @property
    def n(self) -> int:
        """Worker processes, the unit of replication; for a published row, printed figures."""
        return self.decision.processes

    @property
    def verdict(self) -> PickVerdict | None:
        """None for published rows."""
        return self.decision.verdict

    @property
    def newest(self) -> float:
        """When its last row was stored, seconds since the epoch."""
        return self.evidence.newest

    @property
    def runner_up(self) -> NamedInts | None:
        """The next fastest; it may be faster than the pick."""
        return self.decision.runner_up

    @property
    def runner_up_us(self) -> float | None:
        """In the finals where there were any."""
        return None if self.runner_up is None else self.decision.times_us[self.runner_up]

    @property
    def ceiling_share(self) -> float | None:
        """Of :mod:`fp8tune.ceiling`; None where it is not known."""
        return self._of_ceiling.share if self._of_ceiling else None

    @property
    def bound(self) -> Bound | None:
        """What the share is of; None where it is not known."""
        return self._of_ceiling.bound if self._of_ceiling else None

    @property
    def _of_ceiling(self) -> CeilingShare | None:
        found = self.evidence
        known = (found.bytes_moved, found.ceiling_gb_per_s, found.flops, found.peak_flop_per_s)
        return ceiling_share(self.time_us, *known, at_most=is_recorded(found.problem))


@dataclass(frozen=True, eq=False)
class Candidates:
    """All timed evidence that may be compared on one problem and device, the best first."""

    entries: tuple[Evidence, ...]
    incumbent: NamedInts | None = None
    """What the committed table holds for the problem's lookup key."""

    @property
    def problem(self) -> Problem:
        """What all entries ran."""
        return self.entries[0].problem

    @property
    def device(self) -> Device:
        """What all entries ran on; published rows: what their sources name."""
        return self.entries[0].device

    @property
    def kind(self) -> Kind:
        """Where all entries come from."""
        return self.entries[0].kind

    @property
    def default(self) -> NamedInts:
        """The declared default of the kernel version; empty where none is known."""
        version = self.entries[0].version
        return version.default if version else NamedInts()

    @cached_property
    def named(self) -> tuple[Evidence, ...]:
        """The entries that name their config; a publication may not."""
        return tuple(entry for entry in self.entries if entry.config is not None)

    @cached_property
    def times_us(self) -> Mapping[NamedInts, float]:
        """Named config -> its time; the best of several rows that published the same config.

        Times of the finals and of the screen are not compared: see :attr:`slowdowns`.
        """
        times = {entry.config: value_us(entry) for entry in reversed(self.named) if entry.config is not None}
        return times | dict(self.decision.times_us if self.decision else {})

    @cached_property
    def slowdowns(self) -> Mapping[NamedInts, float]:
        """Config -> its time over the best one's, at least 1: of finalists in the finals, of others in the screen."""
        screen_us = {entry.config: entry.screen_us or value_us(entry) for entry in reversed(self.named)}
        found: dict[NamedInts, float] = {}
        for times in (screen_us, self.decision.times_us if self.decision else {}):
            best_us = min(times.values(), default=math.nan)
            found |= {config: max(1.0, time_us / best_us) for config, time_us in times.items() if config is not None}
        return found

    @cached_property
    def decision(self) -> Decision | None:
        """What the finals say; None where there were none."""
        finals = {entry.config: entry.finals for entry in self.named if entry.finals and entry.config is not None}
        version = self.entries[0].version
        if not finals or version is None:
            return None
        return decide_finals(finals, incumbent=self.incumbent, default=version.default, axes=version.axes)

    @cached_property
    def pick(self) -> Evidence:
        """What the finals say; without any the incumbent within the keep band of the best, else the first in canonical
        order within the tie band. Rows that name their config come before others; published ones have no incumbent."""
        if self.decision is not None:
            return next(entry for entry in self.named if entry.config == self.decision.config)
        ranked = self.named or self.entries
        best_us = value_us(ranked[0])
        near = [e for e in ranked if e.stage == ranked[0].stage and value_us(e) <= best_us * (1 + KEEP_BAND)]
        kept = [entry for entry in near if entry.config == self.incumbent and self.kind is not Kind.PUBLISHED]
        tied = (entry for entry in near if value_us(entry) <= best_us * (1 + TIE_BAND))
        return kept[0] if kept else min(tied, key=_canonical_rank)

    @cached_property
    def winner(self) -> Winner:
        """The pick with what stands beside it."""
        pick = self.pick
        quick = None if self.kind is Kind.PUBLISHED else PickVerdict.QUICK
        times_us = self.times_us or {NamedInts(): value_us(pick)}
        decision = self.decision or self._screened(pick, quick, times_us)
        floors = [noise_floor(entry.finals, entry.duplicate) for entry in self.named if entry.duplicate]
        copy, moved = pick.copy_gb_per_s, None if is_recorded(pick.problem) else pick.bytes_moved
        if copy and moved and quick and is_cached(gb_per_s(moved, decision.time_us), copy):
            decision = replace(decision, verdict=PickVerdict.UNRESOLVABLE)
        return Winner(pick, decision, floors[0] if floors and self.decision else None)

    def _screened(self, pick: Evidence, verdict: PickVerdict | None, times_us: Mapping[NamedInts, float]) -> Decision:
        """The pick where there were no finals."""
        decision = unproven(pick.config or NamedInts(), verdict, times_us, len(pick.times_us))
        is_kept = pick.config == self.incumbent and self.kind is not Kind.PUBLISHED
        return decision.kept_as(Kept.COMMITTED if is_kept else Kept.TIED)


def value_us(entry: Evidence) -> float:
    """What a config is ranked by: the median over its worker processes."""
    return statistics.median(entry.times_us)  # finite as stored


def _canonical_rank(entry: Evidence) -> tuple[object, ...]:
    order = () if entry.config is None else canonical_order(entry.version.axes if entry.version else ())(entry.config)
    return *order, value_us(entry), entry.source, entry.note
