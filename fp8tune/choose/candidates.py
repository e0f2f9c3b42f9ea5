"""Everything that competes for one problem on one device, and the pick among it.

Where there were finals they decide (:mod:`fp8tune.choose.judging`); the screen alone gives a ``quick`` pick.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fp8tune.ceiling import gb_per_s, is_cached
from fp8tune.choose.decision import MeasuringPlan, PickVerdict, canonical_order
from fp8tune.choose.judging import FinalsResult, judge, noise_floor
from fp8tune.records import Device, Evidence, FinalsRun, KernelVersion, Kind, NamedInts, Problem

TIE_BAND = MeasuringPlan().tie_band
"""Screened configs this close to the best are as good as the best: repeated sweeps swap them at random."""

KEEP_BAND = MeasuringPlan().keep_band
"""What the committed table holds stays until another is better by more than this; in a screen by its times alone."""


@dataclass(frozen=True)
class Winner:
    """The pick for one problem on one device. Times in microseconds."""

    problem: Problem
    config: NamedInts | None
    """None where the only rows are published ones whose source names no config."""
    device: Device
    kind: Kind
    time_us: float
    n: int
    """Worker processes, the unit of replication; for a published row, printed figures."""
    source: str = ""
    runner_up: NamedInts | None = None
    runner_up_us: float | None = None
    ratio: float | None = None
    """runner-up / pick: below 1 where the pick is a config tied with a faster one."""
    version: KernelVersion | None = None
    lookup_key: NamedInts | None = None
    bytes_moved: int | None = None
    ceiling_share: float | None = None
    """Of :mod:`fp8tune.ceiling`, by the least bytes moved."""
    verdict: PickVerdict | None = None
    """None for published rows: their sources say too little."""
    noise_floor: float | None = None
    """How far the declared default was from itself under a second name, as a share: no smaller difference counts."""
    lower: float | None = None
    """Lower bound of the pick's slowdown against the runner-up, as a share."""
    upper: float | None = None
    """Upper bound of the pick's slowdown against every other finalist, as a share."""
    disputed: bool = False
    """Whether two sweeps' finals, made apart and brought together by an import, come to different picks."""
    complete: bool = True
    note: str = ""


@dataclass(frozen=True, eq=False)
class Candidates:
    """All timed evidence that may be compared on one problem and device, the best first."""

    entries: tuple[Evidence, ...]
    incumbent: NamedInts | None = None
    """What the committed table holds for the problem's lookup key."""
    rivals: tuple[Candidates, ...] = ()
    """Finals of the same kernel version on other devices of the name, or under other drivers."""

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

    @cached_property
    def named(self) -> tuple[Evidence, ...]:
        """The entries that name their config; a publication may not."""
        return tuple(entry for entry in self.entries if entry.config is not None)

    @cached_property
    def times_us(self) -> Mapping[NamedInts, float]:
        """Named config -> its time; the best of several rows that published the same config.

        Finalists have their time of the finals, the others that of the screen: see :meth:`slowdown` for comparing.
        """
        times = {entry.config: value_us(entry) for entry in reversed(self.named) if entry.config is not None}
        return times | dict(self.judgement.times_us if self.judgement else {})

    def slowdown(self, config: NamedInts) -> float:
        """Its time over the best config's, never below 1: among finalists in the finals, for any other in the screen.

        Raises KeyError where it has no row here.
        """
        return self._slowdowns[config]

    @cached_property
    def _slowdowns(self) -> Mapping[NamedInts, float]:
        found: dict[NamedInts, float] = {}
        for times in (self._screen_us, self.judgement.times_us if self.judgement else {}):
            best_us = min(times.values(), default=math.nan)
            found |= {config: max(1.0, time_us / best_us) for config, time_us in times.items()}
        return found

    @cached_property
    def _screen_us(self) -> Mapping[NamedInts, float]:
        entries = [(entry.config, entry.screen_us or value_us(entry)) for entry in reversed(self.named)]
        return {config: time_us for config, time_us in entries if config is not None}

    @cached_property
    def judgement(self) -> FinalsResult | None:
        """What the finals say; None where there were none."""
        visits = {entry.config: entry.finals for entry in self.named if entry.finals and entry.config is not None}
        version = self.entries[0].version
        if not visits or version is None:
            return None
        return judge(visits, incumbent=self.incumbent, default=version.default, axes=version.axes)

    @cached_property
    def pick(self) -> Evidence:
        """What the finals say; without any the incumbent within the keep band of the best, else the first in canonical
        order within the tie band.

        Rows that name their config come before others; published ones have no incumbent.
        """
        if self.judgement is not None:
            return self._entry(self.judgement.decision.config)
        ranked = self.named or self.entries
        best_us = value_us(ranked[0])
        near = [e for e in ranked if e.stage == ranked[0].stage and value_us(e) <= best_us * (1 + KEEP_BAND)]
        if self.incumbent is not None and self.kind is not Kind.PUBLISHED:
            kept = [entry for entry in near if entry.config == self.incumbent]
            if kept:
                return kept[0]
        return min((entry for entry in near if value_us(entry) <= best_us * (1 + TIE_BAND)), key=_canonical_rank)

    def winner(self) -> Winner:
        """The pick with what stands beside it."""
        return self._found

    @cached_property
    def _found(self) -> Winner:
        winner = self._screened() if self.judgement is None else self._judged(self.judgement)
        copy = self.pick.copy_gb_per_s
        if not copy or not winner.bytes_moved or self.kind is Kind.PUBLISHED:
            return winner
        if not is_cached(gb_per_s(winner.bytes_moved, winner.time_us), copy):
            return winner
        return replace(winner, verdict=PickVerdict.UNRESOLVABLE, note="faster than memory: the cache was not flushed")

    @cached_property
    def _is_contradicted(self) -> bool:
        """Whether finals on another device of the name, known to no others of these, come to another pick."""
        known = frozenset().union(*(s.replaces for candidates in (self, *self.rivals) for s in candidates._sessions))
        return any(
            rival.judgement is not None
            and rival.pick.config != self.pick.config
            and any(session.sweep not in known for session in rival._sessions)
            for rival in self.rivals
        )

    @property
    def _sessions(self) -> set[FinalsRun]:
        return {visit.session for entry in self.entries for visit in entry.finals}

    def _entry(self, config: NamedInts) -> Evidence:
        return next(entry for entry in self.named if entry.config == config)

    def _judged(self, judgement: FinalsResult) -> Winner:
        decision = judgement.decision
        twins = [noise_floor(entry.finals, entry.duplicate) for entry in self.named if entry.duplicate]
        is_ambiguous = self._is_contradicted and decision.verdict is not PickVerdict.UNRESOLVABLE
        verdict = PickVerdict.AMBIGUOUS if is_ambiguous else decision.verdict
        return replace(
            self._winner(self.pick, decision.time_us, decision.runner_up),
            n=decision.processes,
            verdict=verdict,
            noise_floor=twins[0] if twins else None,
            lower=_finite(decision.lower),
            upper=_finite(decision.upper),
            disputed=judgement.is_disputed or self._is_contradicted,
        )

    def _screened(self) -> Winner:
        pick = self.pick
        runner_up = next((entry.config for entry in self.named if entry.config != pick.config), None)
        winner = self._winner(pick, value_us(pick), runner_up)
        return winner if pick.kind is Kind.PUBLISHED else replace(winner, verdict=PickVerdict.QUICK)

    def _winner(self, pick: Evidence, time_us: float, runner_up: NamedInts | None) -> Winner:
        next_us = None if runner_up is None else self.times_us[runner_up]
        return Winner(
            problem=pick.problem,
            config=pick.config,
            device=pick.device,
            kind=pick.kind,
            time_us=time_us,
            n=len(pick.times_us),
            source=pick.source,
            runner_up=runner_up,
            runner_up_us=next_us,
            ratio=None if next_us is None else next_us / time_us,
            version=pick.version,
            lookup_key=pick.lookup_key,
            bytes_moved=pick.bytes_moved,
            ceiling_share=ceiling_share(pick, time_us),
            complete=pick.complete,
            note=pick.note,
        )


def value_us(entry: Evidence) -> float:
    """What a config is ranked by: the median over its worker processes."""
    return statistics.median(entry.times_us)  # finite as stored


def ceiling_share(entry: Evidence, time_us: float) -> float | None:
    """The share of :mod:`fp8tune.ceiling`; None where the bytes or the ceiling are not known."""
    if not entry.bytes_moved or not entry.ceiling_gb_per_s:
        return None
    return gb_per_s(entry.bytes_moved, time_us) / entry.ceiling_gb_per_s


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _canonical_rank(entry: Evidence) -> tuple[object, ...]:
    axes = entry.version.axes if entry.version else ()
    order = () if entry.config is None else canonical_order(entry.config, axes)
    return *order, value_us(entry), entry.source, entry.note
