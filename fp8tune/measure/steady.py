"""Blocks that say nothing of a kernel, and what is done about them: they are timed again.

Now and then a machine holds up what it times: launches of one kernel take 2 to 20 times as long, each another time.
Such a block shows by its own samples. Of 17,443 whole blocks in ``results.db`` (H100s and an H200, torch 2.11, Triton
3.6) half scatter by less than 0.6 % in their middle half, 99.5 % by less than 4.2 %, and 17 by more than 10 % and 2 us;
of blocks of three launches 36 of 4,221 do. Of the 13 that took over 1.35 times as long as another of their config, 12
are among those. Why a machine does so is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["is_steady", "middle_half", "steadiest"]

MOST_SPREAD = 1.1
MOST_SPREAD_US = 2.0
"""How far the middle half of a block that counts may reach, one or the other: the shortest kernels scatter by ticks."""
TRIES = 8
"""A kernel whose launches really differ so much takes that many times its measuring time, and no more."""

Samples = TypeVar("Samples", bound=Sequence[float])


def middle_half(samples_us: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest of a block's middle half; of three, the faster two: the first launch is cold.

    Raises ValueError for no samples.
    """
    if not samples_us:
        raise ValueError("no samples")
    ordered = sorted(samples_us)
    low = len(ordered) // 4
    return ordered[low], ordered[max(low, 3 * len(ordered) // 4 - 1)]


def is_steady(samples_us: Sequence[float]) -> bool:
    """Whether a block says something of its kernel."""
    low, high = middle_half(samples_us)
    return high <= MOST_SPREAD * low or high - low <= MOST_SPREAD_US


def steadiest(measure: Callable[[], Samples]) -> tuple[Samples, int]:
    """The first steady block that ``measure`` gives; where it gives none, the one of a few that scatters least.

    And how many others it gave.
    """
    tried: list[Samples] = []
    while len(tried) < TRIES:
        tried.append(measure())
        if is_steady(tried[-1]):
            return tried[-1], len(tried) - 1
    return min(tried, key=_scatter), len(tried) - 1


def _scatter(samples_us: Sequence[float]) -> float:
    low, high = middle_half(samples_us)
    return (high - low) / high
