"""What a shape loses that nobody measured: each is left out in turn, and judges what a lookup gives without it.

A lookup can give the row for any shape, or the row of the nearest key: both are judged. The measured problems play the
unseen ones, so nothing new is timed. Pure functions on all_candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fp8tune.choose.decision import MeasuringPlan
from fp8tune.choose.ranking import KEEP_BAND, Candidates, Shared, choose, usable
from fp8tune.records import NamedInts, Problem
from fp8tune.stats import geomean, t_quantile
from fp8tune_kernels.catalog import SPANS
from fp8tune_kernels.runtime.nearest import nearest
from fp8tune_kernels.tables import Key, Row


@dataclass(frozen=True)
class LeftOut:
    """One problem, judged by a config that was chosen without its shape."""

    problem: Problem
    config: NamedInts
    slowdown: float | None
    """Its time over the best config's there, at least 1; None where it has no time there (it failed or was pruned)."""


@dataclass(frozen=True)
class Regret:
    """The slowdowns of a kernel's problems under one rule, each with its shape left out."""

    problems: tuple[LeftOut, ...]

    @property
    def geomean_slowdown(self) -> float | None:
        """The geometric mean of the slowdowns there are; None where there is none."""
        return geomean(self._slowdowns) if self._slowdowns else None

    @property
    def worst_slowdown(self) -> float | None:
        """The largest of the slowdowns there are; None where there is none."""
        return max(self._slowdowns, default=None)

    @property
    def untimed(self) -> int:
        """Problems on which the config chosen without them has no time."""
        return len(self.problems) - len(self._slowdowns)

    @property
    def _slowdowns(self) -> list[float]:
        return [left.slowdown for left in self.problems if left.slowdown is not None]


@dataclass(frozen=True)
class HeldOut:
    """The same problems under both rules."""

    robust: Regret
    """By the row for any shape."""
    nearest: Regret
    """By the row of the nearest key; by the row for any shape where no key can be compared."""


@dataclass(frozen=True)
class _Losses:
    """One config on all all_candidates, made once and not for every shape again."""

    config: NamedInts
    logs: Sequence[float]
    """Of its slowdowns, by place; 0 where it has no time."""
    total: Sequence[float]
    """Few numbers whose sum is exactly that of the logs."""
    largest: Sequence[tuple[float, int]]
    """Its slowdowns with their places, in falling order."""
    untimed: frozenset[int]

    @classmethod
    def of(cls, config: NamedInts, all_candidates: Sequence[Candidates]) -> _Losses:
        """All that is needed of a config."""
        places = {place: c.slowdown(config) for place, c in enumerate(all_candidates) if config in c.times_us}
        logs = [math.log(places.get(place, 1.0)) for place in range(len(all_candidates))]
        largest = sorted(((slowdown, place) for place, slowdown in places.items()), reverse=True)
        return cls(config, logs, _exact_sum(logs), largest, frozenset(range(len(all_candidates))) - places.keys())

    def without(self, left_out: frozenset[int]) -> Shared | None:
        """What it loses on the other all_candidates; None unless it has a time on all of them."""
        if not self.untimed <= left_out:
            return None
        total = math.fsum([*self.total, *(-self.logs[place] for place in left_out)])  # exact: the sum of the others
        worst = next(slowdown for slowdown, place in self.largest if place not in left_out)
        return Shared(self.config, math.exp(total / (len(self.logs) - len(left_out))), worst, ())


@dataclass(frozen=True)
class _Known:
    """All that a kernel's lookups can rest on."""

    all_candidates: Sequence[Candidates]
    keys: Sequence[Key]
    """Of the all_candidates."""
    losses: Sequence[_Losses]
    rows: Sequence[Row]

    @classmethod
    def of(cls, all_candidates: Sequence[Candidates], rows: Sequence[Row]) -> _Known:
        """The all_candidates with what every config loses on them, and the rows that have a key."""
        configs = dict.fromkeys(config for candidates in all_candidates for config in candidates.times_us)
        losses = [_Losses.of(config, all_candidates) for config in configs]
        return cls(all_candidates, [_key(candidates) for candidates in all_candidates], losses, rows)

    def judge_without(self, own: Sequence[Candidates]) -> list[tuple[LeftOut, LeftOut]]:
        """The problems of one shape, by the row for any shape and by the nearest, both as the rest has them."""
        own_keys = {_key(candidates) for candidates in own}
        left_out = frozenset(place for place, key in enumerate(self.keys) if key in own_keys)
        if len(left_out) == len(self.all_candidates):
            return []
        robust = self._robust_without(left_out) or _default(own[0])
        rows = [row for row in self.rows if row[2] not in own_keys]
        return [
            (_judged(candidates, robust), _judged(candidates, _nearest(candidates, rows) or robust))
            for candidates in own
        ]

    def _robust_without(self, left_out: frozenset[int]) -> NamedInts | None:
        rest = [candidates for place, candidates in enumerate(self.all_candidates) if place not in left_out]
        candidates = (losses.without(left_out) for losses in self.losses)
        chosen = choose([candidate for candidate in candidates if candidate], rest)
        return chosen.config if chosen else None


def leave_one_shape_out(
    all_candidates: Sequence[Candidates], rows: Sequence[Row], others: Sequence[Candidates] = ()
) -> HeldOut | None:
    """Each shape is left out with all that share its lookup keys, and its problems (routings, layouts) are judged.

    ``all_candidates`` are of one kernel: its fallback row is chosen on them. ``rows`` are its rows with a key;
    ``others`` are problems of devices that take these rows without a say in the row for any shape. Where no config
    covers the other shapes, the lookup would give the declared default, and so that is judged. None where no shape can
    be left out: there is nothing to choose from without one.
    """
    chosen_from = usable(all_candidates)
    judged = [*chosen_from, *usable(others)]
    known = _Known.of(chosen_from, rows)
    by_shape: dict[NamedInts, list[Candidates]] = {}
    for candidates in judged:
        by_shape.setdefault(candidates.problem.shape, []).append(candidates)
    pairs = [pair for own in by_shape.values() for pair in known.judge_without(own)]
    if not pairs:
        return None
    robust, near = zip(*pairs, strict=True)
    return HeldOut(Regret(robust), Regret(near))


def nearest_loses_less(held_out: Iterable[HeldOut], incumbent: bool | None = None) -> bool:
    """Whether the nearest key's row loses less in the geometric mean, over the problems that the other has a time on.

    It must have a time on all of those. ``held_out`` are all of one kernel: one rule holds for all devices of an arch.
    ``incumbent`` is what the committed table says, if it says anything: that stays until the other rule is proven to
    lose less by more than the keep band, the problem being the unit of replication. One problem can fall to a config
    that is 3 % apart for no more than noise, since what is chosen without it is chosen anew; many do not at once.
    """
    problems = [pair for found in held_out for pair in zip(found.robust.problems, found.nearest.problems, strict=True)]
    pairs = [(robust.slowdown, near.slowdown) for robust, near in problems if robust.slowdown is not None]
    timed = [(robust, near) for robust, near in pairs if near is not None]
    if not timed or len(timed) < len(pairs):
        return False
    gains = [math.log(robust) - math.log(near) for robust, near in timed]  # of the nearest key's row
    if incumbent is None:
        return fmean(gains) > 0
    return not _is_proven([-gain for gain in gains]) if incumbent else _is_proven(gains)


def _is_proven(gains: Sequence[float]) -> bool:
    """Whether log ratios are above the keep band in the mean: a one-sided t-test."""
    if len(gains) < 2:
        return False
    error = stdev(gains) / math.sqrt(len(gains))
    return fmean(gains) - t_quantile(1 - MeasuringPlan().alpha, len(gains) - 1) * error > math.log1p(KEEP_BAND)


def _nearest(candidates: Candidates, rows: Sequence[Row]) -> NamedInts | None:
    """What a lookup gives on the candidates's device."""
    comparable = [row for row in rows if row[1] in (candidates.device.name, "")]
    row = nearest(_key(candidates), comparable, SPANS.get(candidates.problem.kernel), _default(candidates))
    return NamedInts(row[3]) if row else None


def _judged(candidates: Candidates, config: NamedInts) -> LeftOut:
    slowdown = candidates.slowdown(config) if config in candidates.times_us else None
    return LeftOut(candidates.problem, config, slowdown)


def _exact_sum(numbers: Sequence[float]) -> list[float]:
    """What one float holds of the sum, what a second holds of the rest, and so on until nothing is left."""
    parts: list[float] = []
    while rest := math.fsum([*numbers, *(-part for part in parts)]):
        parts.append(rest)
    return parts


def _key(candidates: Candidates) -> Key:
    return tuple(sorted((candidates.pick.lookup_key or NamedInts()).items()))


def _default(candidates: Candidates) -> NamedInts:
    version = candidates.entries[0].version
    return version.default if version else NamedInts()
