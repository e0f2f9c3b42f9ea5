"""Configs to try next in a grid that does not fit the time budget.

A Gaussian process predicts the log times of configs that were not tried from those that were, of the same problem size
and of others. Next are the configs with the largest expected improvement on the best so far.
``docs/results/search.md`` compares it with other strategies on recorded trials.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fp8tune.records import NamedInts, Problem

Array = npt.NDArray[np.float64]

# Constants were chosen on half of the kernels of the study, and judged on the other half.
ADDITIVE = 0.6  # share of the covariance that is a sum over axes: an axis matters whatever the others are
STEP = 0.85  # correlation of configs that differ by one step on one axis, in the product over axes
AXIS_STEP = 0.7  # the same in the sum
SPREAD = 0.8  # standard deviation of log times over a grid
NOISE = 0.02  # standard deviation of a coarse block
CLIP = 0.7  # slower than exp(0.7) times the best is not told apart: such times say nothing of the fast ones
SIZE_SCALE = 4.0  # doublings of one dim by which the correlation of two sizes falls to 1/e
OTHER_LAYOUT, OTHER_DEVICE = 8.0, 0.5  # in doublings
READY = 2.0  # worth of a config whose code is compiled, in expected improvement: compiling takes most of a trial
MOST = 400  # times that are modelled: the cost of a proposal grows with their cube

REGRET = ((0.05, 0.0693, 0.884), (0.1, 0.0014, 0.139), (0.2, 0.0, 0.0144))
"""Share of the cost of a whole grid, and the regret of the study there: its median and its 95th percentile."""


@dataclass(frozen=True)
class Times:
    """Times of configs on one problem size of one device."""

    problem: Problem
    device: str
    times_us: dict[NamedInts, float] = field(default_factory=dict)

    def doublings(self, size: Times) -> float:
        """Return the distance of two problem sizes."""
        own, others = self.problem.shape, size.problem.shape
        dims = (abs(math.log2(max(own.get(dim, 1), 1) / max(others.get(dim, 1), 1))) for dim in {*own, *others})
        is_other_layout = self.problem.input_layout != size.problem.input_layout
        return sum(dims) + OTHER_LAYOUT * is_other_layout + OTHER_DEVICE * (self.device != size.device)


def proposals(
    count: int,
    candidates: Sequence[NamedInts],
    own: Times,
    others: Sequence[Times] = (),
    ready: Collection[NamedInts] = (),
    pending: Sequence[NamedInts] = (),
) -> list[NamedInts]:
    """Return the candidates to try next, the most promising first. Without any times they are the first candidates.

    Args:
        count: Number of configs to return.
        candidates: Configs that were not tried on the problem size.
        own: Times on the problem size.
        others: Times on other problem sizes of the kernel, and on other devices.
        ready: Configs whose code is compiled.
        pending: Configs that were proposed and have no time yet.
    """
    candidates, count = [*pending, *candidates], count + len(pending)
    groups = [own, *sorted((times for times in others if times.times_us), key=own.doublings)]
    chosen = [_thinned(group.times_us, MOST) for group in groups]
    while len(chosen) > 1 and sum(map(len, chosen)) > MOST:
        chosen.pop()
    if not candidates or not any(chosen):
        return candidates[len(pending) : count]
    logs = [
        np.minimum(times := np.log([*part.values()]), times.min() + CLIP) if part else np.zeros(0) for part in chosen
    ]
    # A problem size has a level of its own: only differences within it count.
    centred = np.concatenate([values - np.median(values) if len(values) else values for values in logs])
    sizes = np.repeat(np.arange(len(chosen)), [len(part) for part in chosen])
    tried, new = _positions([config for part in chosen for config in part], candidates)
    likeness = np.exp([[-row.doublings(column) / SIZE_SCALE for column in groups] for row in groups[: len(chosen)]])

    def covariance(a: Array, b: Array, a_sizes: Array, b_sizes: Array) -> Array:
        alike = SPREAD**2 * likeness[np.ix_(a_sizes, b_sizes)] * _likeness_of_configs(a, b)
        level = a_sizes[:, None] == b_sizes[None, :]  # of a problem size, which is unknown
        return np.asarray(alike + level, dtype=float)

    own_size = np.zeros(len(candidates), dtype=int)
    root = np.linalg.cholesky(covariance(tried, tried, sizes, sizes) + NOISE**2 * np.eye(len(tried)))
    half = np.linalg.solve(root, covariance(tried, new, sizes, own_size))
    mean = half.T @ np.linalg.solve(root, centred)
    variance = np.maximum(SPREAD**2 + 1 - (half**2).sum(axis=0), 1e-9)
    best = centred[sizes == 0].min() if len(own.times_us) else math.inf
    worth = np.array([READY if config in ready else 1.0 for config in candidates])
    result: list[int] = []
    while len(result) < min(count, len(candidates)):
        score = -mean if best == math.inf else worth * _expected_improvement(best - mean, np.sqrt(variance))
        score[result] = -math.inf
        index = len(result) if len(result) < len(pending) else int(np.argmax(score))
        result.append(index)
        # The next is chosen as if this had its expected time, so that a batch is not the same config ten times.
        column = covariance(new, new[[index]], own_size, own_size[:1])[:, 0] - half.T @ half[:, index]
        half = np.vstack([half, column / math.sqrt(variance[index] + NOISE**2)])
        variance = np.maximum(variance - half[-1] ** 2, 1e-9)
        best = min(best, float(mean[index])) if best < math.inf else best
    return [candidates[index] for index in result[len(pending) :]]


def _expected_improvement(gain: Array, deviation: Array) -> Array:
    z = gain / deviation
    below = 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    return np.asarray(gain * below + deviation * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi), dtype=float)


def _likeness_of_configs(a: Array, b: Array) -> Array:
    steps = np.abs(a[:, None, :] - b[None, :, :])
    product, mean = STEP ** steps.sum(axis=2), (AXIS_STEP**steps).mean(axis=2)
    return np.asarray((1 - ADDITIVE) * product + ADDITIVE * mean, dtype=float)


def _positions(*lists: Sequence[NamedInts]) -> list[Array]:
    """Return configs as rows of positions: the rank of each value among the values of its axis."""
    values: dict[str, set[int]] = {}
    for configs in lists:
        for config in configs:
            for axis, value in config.items():
                values.setdefault(axis, set()).add(value)
    ranks = {axis: {value: rank for rank, value in enumerate(sorted(numbers))} for axis, numbers in values.items()}
    return [
        np.array([[ranks[axis].get(config.get(axis, -1), -1) for axis in ranks] for config in configs], dtype=float)
        .reshape(len(configs), len(ranks))
        for configs in lists
    ]  # fmt: skip


def _thinned(times_us: Mapping[NamedInts, float], most: int) -> dict[NamedInts, float]:
    """Return the fastest half of so many, and others at even distances."""
    if len(times_us) <= most:
        return dict(times_us)
    order = sorted(times_us, key=lambda config: times_us[config])
    rest = order[most // 2 :]
    return {config: times_us[config] for config in [*order[: most // 2], *rest[:: -(-len(rest) // (most // 2))]]}


def regret_at(share: float) -> tuple[float, float]:
    """Return the study's regret for a share of a grid's cost: its median and its 95th percentile."""
    shares, *quantiles = zip(*REGRET, strict=True)
    middle, high = (float(np.interp(share, shares, values)) for values in quantiles)
    return middle, high
