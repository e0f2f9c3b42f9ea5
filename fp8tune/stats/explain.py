"""Everything that was tried in one study, and how each config compares with the pick."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.stats.decide import pairs_of
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
    reason: str = ""
    """Why it has no time."""


def finalist_pairs(study: Study) -> Pairs | None:
    """Compare all pairs of finalists; None without finals."""
    return pairs_of(study.finals, default=study.default, axes=study.axes) if study.finals else None


def attempts(study: Study, outcomes: Mapping[NamedInts, Outcome]) -> Sequence[Attempt]:
    """Return the pick, then the other finalists and coarse configs by time, then those without a time.

    Args:
        study: A decided study.
        outcomes: Stored outcomes of its configs; those of configs with a time are not read.
    """
    pairs, pick = finalist_pairs(study), study.pick
    place = pairs.position(pick.config) if pairs else None
    timed: list[Attempt] = []
    for result in study.results:
        config, interval = result.config, None
        slowdown: float | None
        if config is not None and (stage := result.stage) is Stage.FINAL and config in study.choice.times_us:
            time_us = study.choice.times_us[config]
            slowdown = study.choice.ratios.get(config, time_us / study.choice.time_us)
            own = pairs.position(config) if pairs else None
            if pairs and own is not None and place is not None and config != pick.config:
                low, high = math.exp(pairs.lower[own, place]), math.exp(pairs.upper[own, place])
                interval = (low, high) if math.isfinite(high) else None
        else:
            stage, time_us = Stage.COARSE, result.value_us
            slowdown = time_us / pick.coarse_us if pick.coarse_us else None
        timed.append(Attempt(config, Status.OK, stage, time_us, slowdown, interval))
    timed.sort(key=lambda a: (a.config != pick.config, a.stage is not Stage.FINAL, a.time_us, str(a.config)))
    known = {attempt.config for attempt in timed}
    untimed = [Attempt(config, o.status, reason=o.reason) for config, o in outcomes.items() if config not in known]
    return [*timed, *sorted(untimed, key=lambda attempt: (attempt.status, attempt.reason, str(attempt.config)))]
