"""Means, and estimates with their error. Imports neither numpy nor scipy, which take longer than answering a sweep."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TRIMMED_SHARE = 0.25
"""Share of a block's samples left out at each end. A mean would follow the outliers, a minimum is one repetition."""


def trimmed_mean(values: Iterable[float]) -> float:
    """The mean of what is left once a quarter of the values (rounded down) is cut at each end.

    A block's value is that of its samples, a process's value that of its blocks. Same unit as the values.
    Raises ValueError for no values or a non-finite one.
    """
    ordered = sorted(_finite(values))
    cut = int(TRIMMED_SHARE * len(ordered))
    return statistics.fmean(ordered[cut : len(ordered) - cut])


block_value = trimmed_mean


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two middle ones. Raises ValueError for no values or a non-finite one."""
    return statistics.median(_finite(values))


def geomean(ratios: Iterable[float]) -> float:
    """The geometric mean, right for ratios. Raises ValueError for no values, or one that is not finite and positive."""
    checked = _finite(ratios)
    if min(checked) <= 0:
        raise ValueError(f"a geometric mean needs positive values, got {min(checked)}")
    return statistics.geometric_mean(checked)


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, which has ``df`` degrees of freedom of Student's t. Of log ratios, mostly."""

    mean: float
    error: float
    df: float

    @property
    def ratio(self) -> float:
        """Of a log ratio: the ratio."""
        return math.exp(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """Of a log ratio: the two-sided 95 % interval of the ratio."""
        return math.exp(self.lower(0.025)), math.exp(self.upper(0.025))

    def lower(self, level: float) -> float:
        """The one-sided lower bound of the mean that errs in a share ``level`` of cases."""
        return self.mean - t_quantile(1 - level, self.df) * self.error

    def upper(self, level: float) -> float:
        """The one-sided upper bound."""
        return self.mean + t_quantile(1 - level, self.df) * self.error


def estimate(values: Sequence[float], trimmed_share: float = 0.0) -> Estimate:
    """The trimmed mean of independent values, its error from their winsorized variance: Student's t without trimming.

    Tukey and McLaughlin 1963 have the statistic. Raises ValueError for fewer than two values or a non-finite one.
    """
    if len(values) < 2:
        raise ValueError(f"an error needs two values, got {len(values)}")
    ordered = sorted(_finite(values))
    cut = int(trimmed_share * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    center = math.fsum(winsorized) / len(winsorized)
    squares = math.fsum((value - center) ** 2 for value in winsorized)
    df = len(kept) - 1
    return Estimate(math.fsum(kept) / len(kept), math.sqrt(squares / (len(kept) * df)), df)


def weighted(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """A weighted sum of independent estimates, its degrees of freedom by Welch and Satterthwaite."""
    variances = [(weight * part.error) ** 2 for weight, part in parts]
    total = math.fsum(variances)
    shares = math.fsum(variance**2 / part.df for variance, (_, part) in zip(variances, parts, strict=True))
    df = total**2 / shares if shares else min(part.df for _, part in parts)
    return Estimate(math.fsum(weight * part.mean for weight, part in parts), math.sqrt(total), df)


@functools.cache
def t_quantile(share: float, degrees: float) -> float:
    """Student's t that ``share`` (over a half) of the distribution with so many degrees of freedom lies below.

    As ``scipy.special.stdtrit``, which is asked (and imported) for a fraction of a degree only.
    """
    if degrees != int(degrees):
        from scipy.special import stdtrit

        return float(stdtrit(degrees, share))
    degrees = int(degrees)
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
