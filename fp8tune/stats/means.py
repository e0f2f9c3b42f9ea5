"""Means of timings. Imports no numerics library: each process that measures imports this module."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

TRIMMED_SHARE = 0.25  # cut at each end: a mean would follow the outliers, a minimum is one repetition

Item = TypeVar("Item")
Group = TypeVar("Group", bound=Hashable)


def trimmed_mean(values: Iterable[float]) -> float:
    """Return the mean without a quarter of the values, rounded down, at each end.

    It is the value of a block over its samples, and of a process over its blocks. Raises ValueError without values, and
    for one that is not finite.
    """
    in_order = sorted(_finite(values))
    cut = int(TRIMMED_SHARE * len(in_order))
    return statistics.fmean(in_order[cut : len(in_order) - cut])


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two middle ones. Raises ValueError as :func:`trimmed_mean` does."""
    return statistics.median(_finite(values))


def geomean(ratios: Iterable[float]) -> float:
    """Return the geometric mean, which is the right one for ratios. Raises ValueError for what is not positive."""
    numbers = _finite(ratios)
    if min(numbers) <= 0:
        raise ValueError(f"a geometric mean needs positive values, got {min(numbers)}")
    return statistics.geometric_mean(numbers)


def grouped(items: Iterable[Item], key: Callable[[Item], Group]) -> dict[Group, list[Item]]:
    """Group items by a key, in the order they come."""
    groups: dict[Group, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _finite(values: Iterable[float]) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("no values")
    if infinite := [value for value in numbers if not math.isfinite(value)]:
        raise ValueError(f"not a finite number: {infinite[0]}")
    return numbers
