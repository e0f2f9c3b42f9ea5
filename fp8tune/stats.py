"""The few numbers everything else is judged by: a block's value, a median, a geometric mean, a quantile."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

TRIMMED_SHARE = 0.25
"""Share of a block's samples left out at each end. A mean would follow the outliers, a minimum is one repetition."""


def block_value(samples: Sequence[float]) -> float:
    """The 25 % trimmed mean of one block's samples: a quarter is cut at each end, the middle half is averaged.

    Same unit as the samples. Fewer than four samples: their mean. Raises ValueError for no samples or a non-finite one.
    """
    from scipy.stats import trim_mean  # a second to import, and only measuring needs it

    return float(trim_mean(_finite(samples), TRIMMED_SHARE))


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two middle ones. Raises ValueError for no values or a non-finite one."""
    return statistics.median(_finite(values))


def geomean(ratios: Iterable[float]) -> float:
    """The geometric mean, right for ratios. Raises ValueError for no values, or one that is not finite and positive."""
    checked = _finite(ratios)
    if min(checked) <= 0:
        raise ValueError(f"a geometric mean needs positive values, got {min(checked)}")
    return statistics.geometric_mean(checked)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 where both rise together, -1 where one falls as the other rises, 0 where either never changes.

    As ``scipy.stats.spearmanr``, whose import is 0.7 s of the 1.9 that an export would take.
    """
    if len(set(first)) < 2 or len(set(second)) < 2:
        return 0.0
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in ascending order from 1; equal values share the mean of theirs."""
    place, ranks = 0, {}
    for value, count in sorted(Counter(values).items()):
        ranks[value] = place + (count + 1) / 2
        place += count
    return [ranks[value] for value in values]


@functools.cache
def t_quantile(share: float, degrees: int) -> float:
    """Student's t that ``share`` (over a half) of the distribution with so many degrees of freedom lies below.

    As ``scipy.special.stdtrit``, whose import takes longer than reading the rows of a finished sweep.
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within_angle(middle, degrees) < 2 * share - 1 else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _within_angle(angle: float, degrees: int) -> float:
    """Share of Student's t within ``+-tan(angle) * sqrt(degrees)`` (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    is_odd, cosine = degrees % 2, math.cos(angle)
    term, total = (cosine if is_odd else 1.0), 0.0
    for power in range(is_odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total


def _finite(values: Iterable[float]) -> list[float]:
    checked = [float(value) for value in values]
    if not checked:
        raise ValueError("no values")
    if strange := [value for value in checked if not math.isfinite(value)]:
        raise ValueError(f"not a finite number: {strange[0]}")
    return checked
