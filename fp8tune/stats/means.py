"""Means of timings. Imports no numerics library, because every measuring process imports this module."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

TRIMMED_SHARE = 0.25  # cut at each end: a plain mean follows outliers, and a minimum rests on one repetition

Item = TypeVar("Item")
Group = TypeVar("Group", bound=Hashable)


def trimmed_mean(values: Iterable[float]) -> float:
    """Return the mean after dropping a quarter of the values, rounded down, at each end.

    Blocks average their samples this way, and processes their blocks. Raises ValueError for nan, infinity or no values.
    """
    in_order = sorted(_finite_floats(values))
    cut = int(TRIMMED_SHARE * len(in_order))
    return statistics.fmean(in_order[cut : len(in_order) - cut])


def median(values: Iterable[float]) -> float:
    """Return the median. Raises ValueError as :func:`trimmed_mean` does."""
    return statistics.median(_finite_floats(values))


def geomean(ratios: Iterable[float]) -> float:
    """Return the geometric mean, the right mean for ratios. Raises ValueError for a ratio that is not positive."""
    numbers = _finite_floats(ratios)
    if min(numbers) <= 0:
        raise ValueError(f"a geometric mean needs positive values, got {min(numbers)}")
    return statistics.geometric_mean(numbers)


def group_by(items: Iterable[Item], key: Callable[[Item], Group]) -> dict[Group, list[Item]]:
    """Group items by a key, in order of first appearance."""
    groups: dict[Group, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _finite_floats(values: Iterable[float]) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("no values")
    if infinite := [value for value in numbers if not math.isfinite(value)]:
        raise ValueError(f"not a finite number: {infinite[0]}")
    return numbers
