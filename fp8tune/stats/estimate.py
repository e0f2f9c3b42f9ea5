"""Means with their standard error, mostly of log ratios."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, and the degrees of freedom ``df`` for Student's t distribution."""

    mean: float
    error: float
    df: float

    @property
    def ratio(self) -> float:
        """The ratio, if the mean is that of a log ratio."""
        return math.exp(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """The two-sided 95 % confidence interval of the ratio, if the mean is that of a log ratio."""
        return math.exp(self.lower(0.025)), math.exp(self.upper(0.025))

    def lower(self, level: float) -> float:
        """Return the one-sided lower confidence bound of the mean, with error probability ``level``."""
        return self.mean - t_quantile(1 - level, self.df) * self.error

    def upper(self, level: float) -> float:
        """Return the one-sided upper confidence bound of the mean, with error probability ``level``."""
        return self.mean + t_quantile(1 - level, self.df) * self.error


def estimate(values: Sequence[float], trimmed_share: float = 0.0) -> Estimate:
    """Return the trimmed mean of independent values, with the standard error of Tukey and McLaughlin (1963).

    Raises ValueError for fewer than two finite values.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"an error needs two finite values, got {list(values)[:4]}")
    in_order = sorted(values)
    cut = int(trimmed_share * len(in_order))
    middle = in_order[cut : len(in_order) - cut]
    winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
    center = math.fsum(winsorized) / len(winsorized)
    squares = math.fsum((value - center) ** 2 for value in winsorized)
    df = len(middle) - 1
    return Estimate(math.fsum(middle) / len(middle), math.sqrt(squares / (len(middle) * df)), df)


@functools.cache
def t_quantile(share: float, degrees: float) -> float:
    """Return the quantile of Student's t distribution at cumulative probability ``share``."""
    from scipy.special import stdtrit  # takes 0.3 s, so it is imported only to decide

    return float(stdtrit(degrees, share))
