"""One config for many problems: the fallback config, and the slowdown on problems that it was chosen without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from fp8tune.records import NamedInts
from fp8tune.stats.decide import PLAN
from fp8tune.stats.estimate import estimate
from fp8tune.stats.means import geomean, grouped
from fp8tune.stats.pairs import Axes, canonical_order
from fp8tune.stats.study import Study

BOUND = 1.05  # slowdown that a fallback config may have on any measured problem
KNOWN_SHARE = 0.75  # of the held-out problems must know the time of the nearest key's config before a rule changes

# Function from a study, and lookup keys to leave out, to the config of the nearest other key.
Nearest = Callable[[Study, frozenset[NamedInts]], NamedInts | None]


@dataclass(frozen=True)
class Loss:
    """Slowdown of one config over several problems."""

    config: NamedInts
    mean: float  # geometric mean of its time over the best time
    worst: float


@dataclass(frozen=True)
class Losses:
    """Slowdowns of all configs on some studies of one kernel."""

    studies: Sequence[Study]

    @cached_property
    def configs(self) -> list[NamedInts]:
        """All configs, in canonical order."""
        configs = {config for study in self.studies for config in study.slowdowns}
        return sorted(configs, key=canonical_order(self.studies[0].axes))

    @cached_property
    def slowdowns(self) -> NDArray[np.float64]:
        """Slowdowns, indexed by config and study; NaN where a config has no time."""
        rows = [[study.slowdowns.get(config, math.nan) for study in self.studies] for config in self.configs]
        return np.array(rows)

    def covering(self, mask: NDArray[np.bool_] | None = None) -> list[Loss]:
        """Return the configs with a time in every study, or in those of a mask, in canonical order."""
        columns = slice(None) if mask is None else mask
        worst = self.slowdowns[:, columns].max(axis=1)  # NaN where one is
        places = np.flatnonzero(~np.isnan(worst))
        logs = np.log(self.slowdowns[places][:, columns]).tolist()
        return [
            Loss(self.configs[place], math.exp(math.fsum(row) / len(row)), float(worst[place]))
            for place, row in zip(places, logs, strict=True)
        ]


def choose_shared(studies: Iterable[Study], bound: float = BOUND, current: NamedInts | None = None) -> Loss | None:
    """Choose one config for all usable studies of a kernel; None if no config has a time in each.

    It has the least mean slowdown of the configs that nowhere lose more than ``bound``; if every config does somewhere,
    the least worst slowdown. The current config, completed with the default's axes, stays while it is within the keep
    band of both.
    """
    usable = [study for study in studies if study.is_usable]
    if not usable:
        return None
    complete = None if current is None else NamedInts({**usable[0].default, **current})
    return choose_loss(Losses(usable).covering(), bound, complete)


def choose_loss(losses: Sequence[Loss], bound: float = BOUND, current: NamedInts | None = None) -> Loss | None:
    """Choose as :func:`choose_shared` does, among configs in canonical order."""
    keep = 1 + PLAN.keep_band
    holder = next((loss for loss in losses if loss.config == current), None)
    within = [loss for loss in losses if loss.worst <= bound]
    if holder and holder.worst <= bound * keep:
        # Noise may carry a config over the edge of the bound, so others must clear it by the band.
        edge = max(bound, holder.worst) / keep
        within = [holder, *(loss for loss in within if loss.worst <= edge and loss is not holder)]

    def least(among: Sequence[Loss], key: Callable[[Loss], float]) -> Loss:
        best = min(among, key=lambda loss: (key(loss), loss.mean))
        return holder if holder and holder in among and key(holder) <= key(best) * keep else best

    if within:
        return least(within, lambda loss: loss.mean)
    return least(losses, lambda loss: loss.worst) if losses else None


@dataclass(frozen=True)
class HeldOut:
    """Slowdowns of one study under configs that were chosen without its shape.

    None where the time is unknown; infinite where the config failed.
    """

    study: Study
    fallback: float | None
    nearest: float | None


@dataclass(frozen=True)
class Regret:
    """Summary of slowdowns under one rule; None where no problem has a time."""

    mean: float | None  # geometric mean
    worst: float | None
    unknown: int  # problems on which the config has no time


def regret(slowdowns: Iterable[float | None]) -> Regret:
    """Summarize held-out slowdowns."""
    values = list(slowdowns)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return Regret(geomean(finite) if finite else None, max(finite, default=None), len(values) - len(finite))


def hold_out(studies: Iterable[Study], others: Iterable[Study], nearest: Nearest) -> list[HeldOut]:
    """Leave out each shape in turn with all that share its lookup keys, and look it up as one that nobody measured.

    The fallback config is chosen from the other ``studies`` of one kernel; it is the declared default where no config
    covers them. ``others`` are of devices that share these rows without a say in the fallback.
    """
    usable = [study for study in studies if study.is_usable]
    if not usable:
        return []
    losses, keys = Losses(usable), [_key(study) for study in usable]
    everything = [*usable, *(study for study in others if study.is_usable)]
    held_out: list[HeldOut] = []
    for same_shape in grouped(everything, lambda study: study.problem.shape).values():
        left_out = frozenset(map(_key, same_shape))
        rest = np.array([key not in left_out for key in keys], dtype=bool)
        if rest.any():
            best = choose_loss(losses.covering(rest))
            fallback = best.config if best else same_shape[0].default
            for study in same_shape:
                neighbour = nearest(study, left_out) or fallback
                held_out.append(HeldOut(study, _slowdown(study, fallback), _slowdown(study, neighbour)))
    return held_out


def prefers_nearest(held_out: Sequence[HeldOut], current: bool | None = None) -> bool:
    """Decide if unseen keys take the row of the nearest key instead of the fallback row, on all devices of an arch.

    The nearest row must lose less in the geometric mean. The rule of the ``current`` table stays until the other is
    proven to lose less by more than the keep band: noise alone can give one problem a config that is 3 % apart. A
    problem on which the nearest row's config was never timed says nothing, and with fewer than three quarters known the
    current rule stays. A nearest config that failed rules it out.
    """
    comparable = [item for item in held_out if item.fallback is not None and math.isfinite(item.fallback)]
    if any(item.nearest == math.inf for item in comparable):
        return False
    gains = [math.log(item.fallback or 1) - math.log(item.nearest) for item in comparable if item.nearest is not None]
    if not gains or len(gains) < KNOWN_SHARE * len(comparable):
        return bool(current)
    if current is None:
        return fmean(gains) > 0
    return not _is_proven([-gain for gain in gains]) if current else _is_proven(gains)


def _is_proven(gains: Sequence[float]) -> bool:
    """Return True if log ratios are above the keep band in the mean: a one-sided t-test."""
    return len(gains) > 1 and estimate(gains).lower(PLAN.alpha) > math.log1p(PLAN.keep_band)


def _slowdown(study: Study, config: NamedInts) -> float | None:
    return math.inf if config in study.failures else study.slowdowns.get(config)


def _key(study: Study) -> NamedInts:
    return study.lookup_key or NamedInts()


@dataclass(frozen=True)
class Cover:
    """A few configs, and what problems lose if they may launch nothing else. Losses are shares: 0.02 is 2 %."""

    within: float  # bound on each problem's loss
    configs: tuple[NamedInts, ...]  # in canonical order
    chosen: tuple[NamedInts, ...]  # the fastest of the set for each problem
    slowdowns: tuple[float, ...]  # time of the chosen config over the best time, for each problem

    @property
    def worst(self) -> float:
        """The largest loss of any problem."""
        return max(self.slowdowns) - 1

    @property
    def mean(self) -> float:
        """The loss in the geometric mean."""
        return geomean(self.slowdowns) - 1


def cover(slowdowns: Sequence[Mapping[NamedInts, float]], within: float, axes: Axes = ()) -> Cover:
    """Choose few configs such that each problem has one within a share of its best time.

    Greedy: each config is the one for most of the problems that are left, of least worst loss there, and a config that
    the others make redundant is dropped. ``slowdowns`` has, for each problem, the time over the best time of each
    config that is right there. Raises ValueError without problems, and for a problem without configs.
    """
    if not slowdowns or not all(slowdowns):
        raise ValueError("a problem without times cannot be covered" if slowdowns else "no problems")
    order = canonical_order(axes)
    configs = sorted({config for row in slowdowns for config in row}, key=order)
    bound = 1 + within + 1e-12  # a ratio that is 1.02 but for rounding is within 2 %
    fits = [{config: loss for config, loss in row.items() if loss <= bound * min(row.values())} for row in slowdowns]
    picks: list[NamedInts] = []
    while uncovered := [row for row in fits if row.keys().isdisjoint(picks)]:
        gains = {config: [row[config] for row in uncovered if config in row] for config in configs}
        picks.append(max(configs, key=lambda config: (len(gains[config]), -max(gains[config], default=0.0))))
    for config in list(picks):
        rest = [pick for pick in picks if pick != config]
        if not any(row.keys().isdisjoint(rest) for row in fits):
            picks = rest
    picks.sort(key=order)
    best = [min((c for c in picks if c in row), key=lambda c: row[c]) for row in slowdowns]
    losses = tuple(row[config] / min(row.values()) for row, config in zip(slowdowns, best, strict=True))
    return Cover(within, tuple(picks), tuple(best), losses)
