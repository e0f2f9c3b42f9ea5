"""From the screen to the finals: which configs are timed again in fresh processes. A screen says nothing else."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fp8tune.choose.decision import MeasuringPlan
from fp8tune.choose.pairs import Axes, canonical_order
from fp8tune.records import NamedInts

LEAST_CHANCE = 0.01
"""A config less likely to be the pick leaves its place to the next fastest, which may be the best."""


def finalists(
    screen_us: Mapping[NamedInts, Sequence[float]],
    axes: Axes,
    always: Sequence[NamedInts] = (),
    plan: MeasuringPlan = MeasuringPlan(),
) -> tuple[NamedInts, ...]:
    """The configs that go to the finals, in canonical order: those of ``always`` that were timed, the fastest two, and
    those likeliest to be picked, which is the first in canonical order within the tie band. Places left go to the next
    fastest.

    ``screen_us`` holds each config's block values in microseconds, one a round, the rounds in order; a config that was
    left out of later rounds has fewer. At most ``plan.finalists``, and more only if ``always`` alone has more.
    """
    if not screen_us:
        return ()
    ordered = sorted(screen_us, key=canonical_order(axes))
    logs = _round_centred([screen_us[config] for config in ordered])
    slowdowns = logs - logs.min()
    band = max(math.log1p(plan.screen_band), plan.screen_sigmas * _screen_sigma(screen_us.values()))
    fastest = [place for place in np.argsort(slowdowns, kind="stable").tolist() if slowdowns[place] <= band]
    chances = _chances(slowdowns, plan)
    likely = [place for place in np.argsort(-chances, kind="stable").tolist() if chances[place] > LEAST_CHANCE]
    kept = {place for place, config in enumerate(ordered) if config in always}
    for place in (*fastest[: plan.fastest], *likely, *fastest):
        if len(kept) < plan.finalists:
            kept.add(place)
    return tuple(ordered[place] for place in sorted(kept))


def _chances(slowdowns: NDArray[np.float64], plan: MeasuringPlan) -> NDArray[np.float64]:
    """For configs in canonical order with these screened log slowdowns: each one's chance to be within the tie band
    while none before it is.
    """
    # as scipy.special.ndtr, which takes a third of a second to import, in each process that sweeps
    sigmas = (slowdowns - math.log1p(plan.tie_band)) / plan.screen_error
    tied = np.array([math.erfc(sigma / math.sqrt(2)) / 2 for sigma in sigmas.tolist()])
    none_before = np.concatenate([[1.0], np.cumprod(1 - tied)[:-1]])
    chances: NDArray[np.float64] = tied * none_before
    return chances


def _round_centred(screen_us: Collection[Sequence[float]]) -> NDArray[np.float64]:
    """Mean log microseconds of each config over its rounds, each round moved to the mean level of all.

    A round's level is the mean over the configs that every round has: others, which were slow, are still comparable.
    """
    whole = _whole(screen_us)
    shifts = whole.mean(axis=0) - whole.mean()
    means = np.empty(len(screen_us))
    counts = np.array([len(values) for values in screen_us])
    for rounds in set(counts.tolist()):
        logs = np.log([values for values in screen_us if len(values) == rounds])
        means[counts == rounds] = (logs - shifts[:rounds]).mean(axis=1)
    return means


def _screen_sigma(screen_us: Collection[Sequence[float]]) -> float:
    """Standard deviation of a config's round-centred mean, pooled over the configs that every round has."""
    whole = _whole(screen_us)
    degrees = (whole.shape[0] - 1) * (whole.shape[1] - 1)
    if not degrees:
        return 0.0
    residuals = whole - whole.mean(axis=0) - whole.mean(axis=1, keepdims=True) + whole.mean()
    return float(math.sqrt((residuals**2).sum() / degrees / whole.shape[1]))


def _whole(screen_us: Collection[Sequence[float]]) -> NDArray[np.float64]:
    """(config, round): log microseconds of the configs that every round has."""
    rounds = max(map(len, screen_us))
    logs: NDArray[np.float64] = np.log(np.array([values for values in screen_us if len(values) == rounds]))
    return logs
