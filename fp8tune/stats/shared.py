"""Choice of one config for many problems, and its slowdown on problems that were left out of the choice."""

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
from fp8tune.stats.means import group_by
from fp8tune.stats.pairs import Axes, canonical_order
from fp8tune.stats.study import Study

BOUND = 1.05  # largest slowdown allowed for a fallback config on any measured problem
KNOWN_SHARE = 0.75  # least share of held-out problems with a time for the nearest key's config to change a rule

# Function that returns the config of the lookup key nearest to a study's, among all keys but those to leave out.
Nearest = Callable[[Study, frozenset[NamedInts]], NamedInts | None]


@dataclass(frozen=True)
class Loss:
    """Slowdown of one config over several problems."""

    config: NamedInts
    mean: float  # geometric mean of the config's time over the best time
    worst: float


@dataclass(frozen=True)
class Losses:
    """Slowdowns of all configs on some studies of one kernel."""

    studies: Sequence[Study]

    @cached_property
    def configs(self) -> list[NamedInts]:
        """All configs with a time in any study, in canonical order."""
        configs = {config for study in self.studies for config in study.slowdowns}
        return sorted(configs, key=canonical_order(self.studies[0].axes))

    @cached_property
    def slowdowns(self) -> NDArray[np.float64]:
        """Slowdowns, indexed by config and study; NaN where a config has no time."""
        rows = [[study.slowdowns.get(config, math.nan) for study in self.studies] for config in self.configs]
        return np.array(rows)

    def losses_over(self, mask: NDArray[np.bool_] | None = None) -> list[Loss]:
        """Return a loss for each config timed in all studies, or all studies of ``mask``, in canonical order."""
        columns = slice(None) if mask is None else mask
        worst = self.slowdowns[:, columns].max(axis=1)  # NaN if any study has no time
        complete = np.flatnonzero(~np.isnan(worst))
        logs = np.log(self.slowdowns[complete][:, columns]).tolist()
        return [
            Loss(self.configs[index], math.exp(math.fsum(row) / len(row)), float(worst[index]))
            for index, row in zip(complete, logs, strict=True)
        ]


def choose_shared(studies: Iterable[Study], bound: float = BOUND, current: NamedInts | None = None) -> Loss | None:
    """Choose one config for all usable studies of a kernel; None if no config was timed in all of them.

    Of the configs whose worst slowdown is at most ``bound``, choose the one with the least mean slowdown. If there are
    none, choose the config with the least worst slowdown. The current config, completed with the default's axes, stays
    if it exceeds ``bound`` and the least slowdown by no more than the keep band.
    """
    usable = [study for study in studies if study.is_usable]
    if not usable:
        return None
    complete = None if current is None else NamedInts({**usable[0].default, **current})
    return choose_loss(Losses(usable).losses_over(), bound, complete)


def choose_loss(losses: Sequence[Loss], bound: float = BOUND, current: NamedInts | None = None) -> Loss | None:
    """Choose by the rules of :func:`choose_shared` among losses in canonical order of their configs."""
    keep = 1 + PLAN.keep_band
    holder = next((loss for loss in losses if loss.config == current), None)
    within = [loss for loss in losses if loss.worst <= bound]
    if holder and holder.worst <= bound * keep:
        # Noise may move a config across the bound, so other configs must be below it by the keep band.
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
    """Slowdowns of one study with the fallback config and the nearest key's, both chosen without the study's shape.

    A slowdown is None if the config was not timed, and infinite if it failed.
    """

    study: Study
    fallback: float | None
    nearest: float | None


def hold_out(studies: Iterable[Study], others: Iterable[Study], nearest: Nearest) -> list[HeldOut]:
    """Return the slowdowns that each study would have if its shape had never been measured.

    A shape is left out with all studies of its lookup keys. The fallback config is chosen from the other ``studies``
    or, if no config was timed in all of them, is the default. ``others`` are looked up, but do not affect the fallback.
    """
    usable = [study for study in studies if study.is_usable]
    if not usable:
        return []
    losses, keys = Losses(usable), [_key(study) for study in usable]
    everything = [*usable, *(study for study in others if study.is_usable)]
    held_out: list[HeldOut] = []
    for same_shape in group_by(everything, lambda study: study.problem.shape).values():
        left_out = frozenset(map(_key, same_shape))
        rest = np.array([key not in left_out for key in keys], dtype=bool)
        if rest.any():
            best = choose_loss(losses.losses_over(rest))
            fallback = best.config if best else same_shape[0].default
            for study in same_shape:
                neighbour = nearest(study, left_out) or fallback
                held_out.append(HeldOut(study, _slowdown(study, fallback), _slowdown(study, neighbour)))
    return held_out


def prefers_nearest(held_out: Sequence[HeldOut], current: bool | None = None) -> bool:
    """Return True if unmeasured keys should use the nearest key's row, False if the fallback row, for one arch.

    Only problems with a time for the fallback config count. ``current`` is the rule in use. The first match decides:
    1. False if a nearest config failed.
    2. The ``current`` rule if fewer than three quarters of the problems have a time for their nearest config.
    3. Without a ``current`` rule, True if nearest configs have the smaller geometric mean slowdown.
    4. The ``current`` rule, unless the other is proven faster by more than the keep band.
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
    """Return True if a one-sided t-test proves that the mean of log ratios exceeds the keep band."""
    return len(gains) > 1 and estimate(gains).lower(PLAN.alpha) > math.log1p(PLAN.keep_band)


def _slowdown(study: Study, config: NamedInts) -> float | None:
    return math.inf if config in study.failures else study.slowdowns.get(config)


def _key(study: Study) -> NamedInts:
    return study.lookup_key or NamedInts()


@dataclass(frozen=True)
class Cover:
    """A small set of configs, of which each problem has one that loses at most ``within``. A loss of 0.02 is 2 %."""

    within: float
    configs: tuple[NamedInts, ...]  # in canonical order
    worst: float  # largest loss of any problem if launches use no others


def cover(slowdowns: Sequence[Mapping[NamedInts, float]], within: float, axes: Axes = ()) -> Cover:
    """Find a small set of configs so that each problem has one within a share (``within``) of its best time.

    Greedy: each step adds the config that fits most uncovered problems; ties go to the least worst loss.
    Configs made redundant by the others are then dropped. ``slowdowns`` has, for each problem, the time over the best
    time of each correct config. Raises ValueError without problems, and for a problem without configs.
    """
    if not slowdowns or not all(slowdowns):
        raise ValueError("a problem without times cannot be covered" if slowdowns else "no problems")
    order = canonical_order(axes)
    configs = sorted({config for row in slowdowns for config in row}, key=order)
    bound = 1 + within + 1e-12  # a ratio of 1.02 counts as within 2 % despite rounding
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
    best = [min(row[config] for config in picks if config in row) / min(row.values()) for row in slowdowns]
    return Cover(within, tuple(picks), max(best) - 1)
