"""What a shape loses that nobody measured: each is left out in turn, and takes what a lookup gives without it.

A lookup can give the row for any shape, or the row of the nearest key: both are tried. Measured problems stand for
unseen ones, so nothing new is timed. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fp8tune.choose.candidates import KEEP_BAND, Candidates
from fp8tune.choose.decision import MeasuringPlan
from fp8tune.choose.ranking import Losses, choose, grouped, usable
from fp8tune.records import NamedInts, Problem
from fp8tune.stats.estimate import estimate
from fp8tune.stats.means import geomean
from fp8tune_kernels.catalog import SPANS
from fp8tune_kernels.runtime.nearest import nearest as nearest_row
from fp8tune_kernels.tables import Key, Row


@dataclass(frozen=True)
class LeftOut:
    """One problem with a config that was chosen without its shape."""

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
        """None where no problem has a time."""
        return geomean(self._slowdowns) if self._slowdowns else None

    @property
    def worst_slowdown(self) -> float | None:
        """None where no problem has a time."""
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


def leave_one_shape_out(
    all_candidates: Sequence[Candidates], rows: Sequence[Row], others: Sequence[Candidates] = ()
) -> HeldOut | None:
    """Each shape is left out with all that share its lookup keys; its problems (routings, layouts) say what it loses.

    ``all_candidates`` are of one kernel: its row for any shape is chosen on them. ``rows`` are its rows with a key;
    ``others`` are problems of devices that take these rows without a say in the row for any shape. Where no config
    covers the other shapes, a lookup gives the declared default. None where no shape can be left out.
    """
    chosen_from = usable(all_candidates)
    if not chosen_from:
        return None
    losses = Losses.of(chosen_from)
    keys = [_key(candidates) for candidates in chosen_from]
    pairs: list[tuple[LeftOut, LeftOut]] = []
    for own in grouped([*chosen_from, *usable(others)], lambda candidates: candidates.problem.shape).values():
        own_keys = {_key(candidates) for candidates in own}
        rest = np.array([key not in own_keys for key in keys], dtype=bool)
        if rest.any():
            best = choose(losses.shared(rest))
            fallback = best.config if best else own[0].default
            near = [row for row in rows if row[2] not in own_keys]
            pairs += [(_left_out(each, fallback), _left_out(each, _nearest(each, near) or fallback)) for each in own]
    if not pairs:
        return None
    robust, nearest = zip(*pairs, strict=True)
    return HeldOut(Regret(robust), Regret(nearest))


def nearest_loses_less(held_out: Iterable[HeldOut], incumbent: bool | None = None) -> bool:
    """Whether the nearest key's row loses less in the geometric mean, over the problems that the other has a time on.

    It must have a time on all of those. ``held_out`` are all of one kernel: one rule holds for all devices of an arch.
    ``incumbent``: what the committed table says, if anything. That stays until the other rule is proven to lose less
    by more than the keep band, over problems: noise alone can give one problem a config that is 3 % apart.
    """
    gains = []  # of the nearest key's row
    for found in held_out:
        for robust, near in zip(found.robust.problems, found.nearest.problems, strict=True):
            if robust.slowdown is not None:
                if near.slowdown is None:
                    return False
                gains.append(math.log(robust.slowdown) - math.log(near.slowdown))
    if not gains:
        return False
    if incumbent is None:
        return fmean(gains) > 0
    return not _is_proven([-gain for gain in gains]) if incumbent else _is_proven(gains)


def _is_proven(gains: Sequence[float]) -> bool:
    """Whether log ratios are above the keep band in the mean: a one-sided t-test."""
    return len(gains) > 1 and estimate(gains).lower(MeasuringPlan().alpha) > math.log1p(KEEP_BAND)


def _nearest(candidates: Candidates, rows: Sequence[Row]) -> NamedInts | None:
    """What a lookup gives on the candidates' device."""
    comparable = [row for row in rows if row[1] in (candidates.device.name, "")]
    row = nearest_row(_key(candidates), comparable, SPANS.get(candidates.problem.kernel), candidates.default)
    return NamedInts(row[3]) if row else None


def _left_out(candidates: Candidates, config: NamedInts) -> LeftOut:
    return LeftOut(candidates.problem, config, candidates.slowdowns.get(config))


def _key(candidates: Candidates) -> Key:
    return tuple(sorted((candidates.pick.lookup_key or NamedInts()).items()))
