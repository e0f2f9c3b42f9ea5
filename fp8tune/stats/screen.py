"""Choice of finalists: the configs of the coarse pass that are timed again in fresh processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from fp8tune.records import NamedInts
from fp8tune.stats.decide import PLAN, MeasuringPlan
from fp8tune.stats.pairs import Axes, Matrix, canonical_order, residuals

LEAST_CHANCE = 0.01  # a config less likely to be the pick yields its slot to the next fastest, which may be the best


def choose_finalists(
    coarse_us: Mapping[NamedInts, Sequence[float]],
    axes: Axes,
    always: Sequence[NamedInts] = (),
    plan: MeasuringPlan = PLAN,
) -> tuple[NamedInts, ...]:
    """Return the configs that go to the finals, in canonical order.

    All timed configs of ``always`` go, even if they are more than ``plan.finalists``. The remaining slots go to the
    ``plan.fastest`` fastest configs, then to the configs most likely to be the pick, then to the next fastest.

    ``coarse_us`` holds the block times of each config in microseconds, one for each round in order. A config that was
    dropped from later rounds has fewer times.
    """
    if not coarse_us:
        return ()
    configs = sorted(coarse_us, key=canonical_order(axes))
    log_times = _round_centred_means([coarse_us[config] for config in configs])
    slowdowns = log_times - log_times.min()
    band = max(math.log1p(plan.screen_band), plan.screen_sigmas * _pooled_standard_error(coarse_us.values()))
    fastest = [index for index in np.argsort(slowdowns, kind="stable").tolist() if slowdowns[index] <= band]
    p_win = _win_probabilities(slowdowns, plan)
    likely = [index for index in np.argsort(-p_win, kind="stable").tolist() if p_win[index] > LEAST_CHANCE]
    finalists = {index for index, config in enumerate(configs) if config in always}
    for index in (*fastest[: plan.fastest], *likely, *fastest):
        if len(finalists) < plan.finalists:
            finalists.add(index)
    return tuple(configs[index] for index in sorted(finalists))


def _win_probabilities(slowdowns: Matrix, plan: MeasuringPlan) -> Matrix:
    """Return each config's probability of being the pick, which is the first config within the tie band."""
    error_cdf = NormalDist(0, plan.screen_error).cdf
    tied = np.array([error_cdf(math.log1p(plan.tie_band) - slowdown) for slowdown in slowdowns.tolist()])
    none_before = np.concatenate([[1.0], np.cumprod(1 - tied)[:-1]])
    probabilities: Matrix = tied * none_before
    return probabilities


def _round_centred_means(coarse_us: Collection[Sequence[float]]) -> Matrix:
    """Return the mean log microseconds of each config, after removing drift between rounds.

    Drift is estimated from the configs timed in every round, so that configs dropped early, the slow ones, compare too.
    """
    complete = _complete_log_times(coarse_us)
    drift = complete.mean(axis=0) - complete.mean()
    means = np.empty(len(coarse_us))
    counts = np.array([len(values) for values in coarse_us])
    for rounds in set(counts.tolist()):
        log_times = np.log([values for values in coarse_us if len(values) == rounds])
        means[counts == rounds] = (log_times - drift[:rounds]).mean(axis=1)
    return means


def _pooled_standard_error(coarse_us: Collection[Sequence[float]]) -> float:
    """Return the standard error of a config's mean after round centring, pooled over configs timed in every round."""
    complete = _complete_log_times(coarse_us)
    degrees = (complete.shape[0] - 1) * (complete.shape[1] - 1)
    if not degrees:
        return 0.0
    return math.sqrt((residuals(complete) ** 2).sum() / degrees / complete.shape[1])


def _complete_log_times(coarse_us: Collection[Sequence[float]]) -> Matrix:
    """Return log microseconds of the configs timed in every round, indexed by config and round."""
    rounds = max(map(len, coarse_us))
    log_times: Matrix = np.log(np.array([values for values in coarse_us if len(values) == rounds]))
    return log_times
