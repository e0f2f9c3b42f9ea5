"""Explanation of a decision: every config that was tried, and the steps from the times to the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.stats.decide import MeasuringPlan, pairs_of, plan_of
from fp8tune.stats.pairs import Pairs
from fp8tune.stats.study import Stage, Study


@dataclass(frozen=True)
class Attempt:
    """One config of a study. The slowdown is its time over the pick's in the same stage."""

    config: NamedInts | None
    status: Status
    stage: Stage = Stage.COARSE
    time_us: float | None = None
    slowdown: float | None = None
    interval: tuple[float, float] | None = None
    """One-sided bounds of the slowdown; None without finals of several processes."""
    reason: str = ""  # why it has no time


@dataclass(frozen=True, eq=False)
class Explanation:
    """A decided study, with the stored outcomes of configs that have no time in it."""

    study: Study
    outcomes: Mapping[NamedInts, Outcome] = field(default_factory=dict)

    @cached_property
    def pairs(self) -> Pairs | None:
        """All pairs of finalists; None without finals."""
        study = self.study
        return pairs_of(study.finals, study.default, study.axes) if study.finals else None

    @property
    def plan(self) -> MeasuringPlan:
        """Bands that decide the verdict."""
        return plan_of(self.study.finals) if self.study.finals else MeasuringPlan()

    @cached_property
    def attempts(self) -> Sequence[Attempt]:
        """The pick, then the other finalists and the coarse configs, each by time, then those without a time."""
        timed = [self._timed(place) for place in range(len(self.study.results))]
        pick = self.study.pick.config
        timed.sort(key=lambda a: (a.config != pick, a.stage is not Stage.FINAL, a.time_us, str(a.config)))
        known = {attempt.config for attempt in timed}
        rest = [Attempt(c, o.status, reason=o.reason) for c, o in self.outcomes.items() if c not in known]
        return [*timed, *sorted(rest, key=lambda attempt: (attempt.status, attempt.reason, str(attempt.config)))]

    def _timed(self, place: int) -> Attempt:
        study, result, pick = self.study, self.study.results[place], self.study.pick
        config, times_us = result.config, self.study.choice.times_us
        if not result.finals or config is None or config not in times_us:
            slowdown = result.value_us / pick.coarse_us if pick.coarse_us else None
            return Attempt(config, Status.OK, Stage.COARSE, result.value_us, slowdown)
        slowdown = study.choice.ratios.get(config, times_us[config] / study.choice.time_us)
        interval, pairs = None, self.pairs
        if pairs and config != pick.config and config in pairs.configs and pick.config in pairs.configs:
            at = pairs.configs.index(config), pairs.configs.index(pick.config)
            low, high = math.exp(pairs.lower[at]), math.exp(pairs.upper[at])
            interval = (low, high) if math.isfinite(high) else None
        return Attempt(config, Status.OK, Stage.FINAL, times_us[config], slowdown, interval)
