"""Stalled blocks, which say nothing of a kernel, and what is done about them: they are timed again.

Now and then a machine stalls: launches of one kernel take 1.5 to 20 times as long, some of them or all that follow.
Such a block shows by its own samples. Of 110,333 whole blocks that H100s and H200s timed (torch 2.11,
Triton 3.6) the middle half ends within 1.1 % of the fastest sample in one of two, within 7.6 % in 99.5 %, and over 10 %
and 2 us above it in 119. Three blocks took over 1.3 times as long as another of their config: but for a launch or two
they were stalled from end to end, so that their middle halves are narrow, and end at 1.6 to 2.3 times the fastest
sample. Of 15,330 estimates, which were of three launches then, the second and third are so far apart in 51. Why a
machine does so is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["first_steady", "is_steady", "reach"]

MOST_REACH = 1.1
MOST_REACH_US = 2.0
"""How far above the fastest sample the middle half of a block that counts may end, one or the other: the shortest
kernels scatter by ticks."""
TRIES = 8
"""A kernel whose launches really differ so much takes that many times its measuring time, and no more."""

Samples = TypeVar("Samples", bound=Sequence[float])


def reach(samples_us: Sequence[float]) -> tuple[float, float]:
    """The fastest sample of a block and the slowest of its middle half; of two or three the second.

    Raises ValueError for no samples.
    """
    if not samples_us:
        raise ValueError("no samples")
    ordered = sorted(samples_us)
    middle_half_ends = max(2, 3 * len(ordered) // 4)
    return ordered[0], ordered[:middle_half_ends][-1]


def is_steady(samples_us: Sequence[float]) -> bool:
    """Whether a block says something of its kernel."""
    fastest, slow = reach(samples_us)
    return slow <= MOST_REACH * fastest or slow - fastest <= MOST_REACH_US


def first_steady(measure: Callable[[], Samples]) -> tuple[Samples, int]:
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
    fastest, slow = reach(samples_us)
    return slow / fastest
