"""Choice of finalists: the configs of the coarse pass that are timed again in fresh processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from fp8tune.records import NamedInts
from fp8tune.stats.decide import PLAN, MeasuringPlan
from fp8tune.stats.pairs import Axes, Matrix, canonical_order, residuals

LEAST_CHANCE = 0.01  # a config less likely to be the pick leaves its place to the next fastest, which may be the best


def choose_finalists(
    coarse_us: Mapping[NamedInts, Sequence[float]],
    axes: Axes,
    always: Sequence[NamedInts] = (),
    plan: MeasuringPlan = PLAN,
) -> tuple[NamedInts, ...]:
    """Return the configs that go to the finals, in canonical order.

    These are the timed ones of ``always``, even if they exceed ``plan.finalists``, the fastest two, and those likeliest
    to be the pick, which is the first in canonical order within the tie band. The next fastest take the places left.

    ``coarse_us`` has the block values of each config in microseconds, one for each round, the rounds in order. A config
    that was left out of later rounds has fewer.
    """
    if not coarse_us:
        return ()
    configs = sorted(coarse_us, key=canonical_order(axes))
    logs = _round_centred([coarse_us[config] for config in configs])
    slowdowns = logs - logs.min()
    band = max(math.log1p(plan.screen_band), plan.screen_sigmas * _error_of_means(coarse_us.values()))
    fastest = [place for place in np.argsort(slowdowns, kind="stable").tolist() if slowdowns[place] <= band]
    chances = _chances(slowdowns, plan)
    likely = [place for place in np.argsort(-chances, kind="stable").tolist() if chances[place] > LEAST_CHANCE]
    places = {place for place, config in enumerate(configs) if config in always}
    for place in (*fastest[: plan.fastest], *likely, *fastest):
        if len(places) < plan.finalists:
            places.add(place)
    return tuple(configs[place] for place in sorted(places))


def _chances(slowdowns: Matrix, plan: MeasuringPlan) -> Matrix:
    """Return each config's chance to be within the tie band while no config before it is, in canonical order."""
    in_band = NormalDist(0, plan.screen_error).cdf
    chances_of_tie = np.array([in_band(math.log1p(plan.tie_band) - slowdown) for slowdown in slowdowns.tolist()])
    none_before = np.concatenate([[1.0], np.cumprod(1 - chances_of_tie)[:-1]])
    chances: Matrix = chances_of_tie * none_before
    return chances


def _round_centred(coarse_us: Collection[Sequence[float]]) -> Matrix:
    """Return the mean log microseconds of each config, each round shifted to the mean level of all.

    A round's level is the mean over the configs that every round has: the others, which were slow, stay comparable.
    """
    complete = _complete(coarse_us)
    shifts = complete.mean(axis=0) - complete.mean()
    means = np.empty(len(coarse_us))
    counts = np.array([len(values) for values in coarse_us])
    for rounds in set(counts.tolist()):
        logs = np.log([values for values in coarse_us if len(values) == rounds])
        means[counts == rounds] = (logs - shifts[:rounds]).mean(axis=1)
    return means


def _error_of_means(coarse_us: Collection[Sequence[float]]) -> float:
    """Return the standard deviation of a config's round-centred mean, pooled over the configs that every round has."""
    complete = _complete(coarse_us)
    degrees = (complete.shape[0] - 1) * (complete.shape[1] - 1)
    if not degrees:
        return 0.0
    return math.sqrt((residuals(complete) ** 2).sum() / degrees / complete.shape[1])


def _complete(coarse_us: Collection[Sequence[float]]) -> Matrix:
    """Return log microseconds of the configs that every round has, indexed by config and round."""
    rounds = max(map(len, coarse_us))
    logs: Matrix = np.log(np.array([values for values in coarse_us if len(values) == rounds]))
    return logs
