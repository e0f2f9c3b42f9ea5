"""The few numbers everything else is judged by: a block's value, a median, a geometric mean."""

from __future__ import annotations

import math
import statistics
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


def _finite(values: Iterable[float]) -> list[float]:
    checked = [float(value) for value in values]
    if not checked:
        raise ValueError("no values")
    if strange := [value for value in checked if not math.isfinite(value)]:
        raise ValueError(f"not a finite number: {strange[0]}")
    return checked
