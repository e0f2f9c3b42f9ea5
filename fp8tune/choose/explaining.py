"""How one pick came about: every config that was tried, the finals pair by pair, and why the verdict follows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fp8tune.choose.candidates import Candidates, Winner, value_us
from fp8tune.choose.decision import MeasuringPlan, PickVerdict, pairs_of, plan_of
from fp8tune.lookups import Lookup as Found
from fp8tune.choose.pairs import Pairs
from fp8tune.records import Evidence, NamedInts, Outcome, Status


@dataclass(frozen=True)
class Tried:
    """One config of a problem. Slowdowns are its time over the pick's: 1.01 is one percent slower."""

    config: NamedInts | None
    status: Status
    stage: str = "screen"
    """``final`` or ``screen``: times of one are not compared with those of the other."""
    time_us: float | None = None
    slowdown: float | None = None
    interval: tuple[float, float] | None = None
    """Bounds of the slowdown, each one-sided; None without finals of several processes."""
    reason: str = ""
    """Why it has no time."""


@dataclass(frozen=True)
class Pair:
    """Two finalists: how much slower the first is, as a ratio with bounds."""

    config: NamedInts
    rival: NamedInts
    slowdown: float
    lower: float
    upper: float


@dataclass(frozen=True, eq=False)
class Explanation:
    """All that is known of one problem on one device."""

    candidates: Candidates
    outcomes: Mapping[NamedInts, Outcome]
    """What became of the configs that were run here; those that have a time may be left out."""
    found: Found | None
    """What a lookup gives for it; None where no table can hold it."""

    @property
    def winner(self) -> Winner:
        """The pick."""
        return self.candidates.winner

    @cached_property
    def _finals(self) -> Mapping[NamedInts, Evidence]:
        return {e.config: e for e in self.candidates.named if e.finals and e.config is not None}

    @cached_property
    def pairs(self) -> Pairs | None:
        """The finalists beside each other; None where there were no finals."""
        version = self.candidates.entries[0].version
        if not self._finals or version is None:
            return None
        times = {config: entry.finals for config, entry in self._finals.items()}
        return pairs_of(times, default=version.default, axes=version.axes)

    @property
    def plan(self) -> MeasuringPlan:
        """The bands that the verdict goes by."""
        return plan_of({config: entry.finals for config, entry in self._finals.items()})

    @cached_property
    def tried(self) -> Sequence[Tried]:
        """The pick, then the other finalists and the screened configs, each by time; then those without a time."""
        finalists = self._finalists()
        screened = [self._screened(entry) for entry in self.candidates.entries if entry.config not in finalists]
        timed = sorted((*finalists.values(), *screened), key=self._order)
        known = {one.config for one in timed}
        rest = (Tried(config, o.status, reason=o.reason) for config, o in self.outcomes.items() if config not in known)
        return [*timed, *sorted(rest, key=lambda one: (one.status, one.reason, str(one.config)))]

    @property
    def untimed(self) -> Counter[tuple[Status, str]]:
        """Status and reason of the configs without a time -> how many they are, the most first."""
        return Counter((one.status, one.reason) for one in self.tried if one.time_us is None)

    def pair_list(self) -> list[Pair]:
        """Each finalist against each other."""
        if (pairs := self.pairs) is None:
            return []
        mean, lower, upper = pairs.mean, pairs.lower, pairs.upper
        return [
            Pair(config, rival, math.exp(mean[i, j]), math.exp(lower[i, j]), math.exp(upper[i, j]))
            for i, config in enumerate(pairs.configs)
            for j, rival in enumerate(pairs.configs)
            if i != j
        ]

    def steps(self) -> list[str]:
        """How the verdict follows, a sentence each."""
        winner, decision = self.winner, self.winner.decision
        if self.pairs is None:
            if winner.verdict is None:
                return ["Others published these rows: their sources say too little for a verdict."]
            return [
                "There were no finals: the screen, in one process, chose the pick.",
                *([CACHED] if winner.verdict is PickVerdict.UNRESOLVABLE else []),
            ]
        keep, lost = self.plan.keep_band, decision.upper
        count = len(self.pairs.configs)
        turns = "1 config" if count == 1 else f"{count} configs in turns"
        said = [f"The finals timed {turns}, in {decision.processes} fresh processes."]
        if winner.verdict is PickVerdict.UNRESOLVABLE:
            return [*said, CACHED]
        if count == 1:
            return [*said, "No other config was in the finals, so there is nothing to compare it with: only."]
        said.append(
            f"Paired over processes, the pick loses at most {100 * lost:.1f} % against any other finalist."
            if lost > 0
            else "Paired over processes, the pick is proven faster than every other finalist: certified."
        )
        if lost > keep:
            said.append(f"That is above the band of {100 * keep:.1f} % within which a pick is kept: ambiguous.")
        elif lost > 0 and winner.verdict is PickVerdict.KEPT_INCUMBENT:
            said.append(
                f"That is within {100 * keep:.1f} %, and a new table would hold another config: kept-incumbent."
            )
        elif lost > 0:
            said.append(f"That is within {100 * keep:.1f} %, and a new table would hold the same config: near-tie.")
        return said

    def _finalists(self) -> dict[NamedInts | None, Tried]:
        """The finalists by config; one that some processes lack has no interval."""
        pairs, pick = self.pairs, self.winner.config
        if pairs is None:
            return {}
        times_us = self.winner.decision.times_us
        place = {config: number for number, config in enumerate(pairs.configs)}
        found: dict[NamedInts | None, Tried] = {}
        for config in self._finals:
            time_us = times_us.get(config)
            if time_us is None or pick is None:
                continue
            slowdown, interval = time_us / self.winner.time_us, None
            if config in place and pick in place and config != pick:
                i, j = place[config], place[pick]
                slowdown = math.exp(pairs.mean[i, j])
                low, high = math.exp(pairs.lower[i, j]), math.exp(pairs.upper[i, j])
                interval = (low, high) if math.isfinite(high) else None
            found[config] = Tried(config, Status.OK, "final", time_us, slowdown, interval)
        return found

    def _screened(self, entry: Evidence) -> Tried:
        pick = self.winner.evidence
        of_pick = pick.screen_us if pick.stage == "final" else value_us(pick)
        time_us = value_us(entry)
        return Tried(entry.config, Status.OK, "screen", time_us, time_us / of_pick if of_pick else None)

    def _order(self, one: Tried) -> tuple[object, ...]:
        return one.config != self.winner.config, one.stage != "final", one.time_us or 0.0, str(one.config)


CACHED = "Its times are too short to tell configs apart, or faster than memory allows: what was there stays."
