"""The cells of a row, timed in turns: what slows the device for a while slows all of them, or is outvoted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from fp8tune.bench.cells import Timing
from fp8tune.stats import median

ROUNDS = 3
"""A cell is the median of so many blocks. On an H100 about one block in a thousand takes several times as long as the
others, which made 25 % of the ceiling of what is 98 %; why is not known."""

Name = TypeVar("Name")


def in_rounds(cells: Mapping[Name, Callable[[int], Timing]]) -> dict[Name, Timing]:
    """Ask each cell once a round, another one first in each; a cell that fails is asked no more, and has its reason."""
    names = list(cells)
    timed: dict[Name, list[Timing]] = {name: [] for name in names}
    for number in range(ROUNDS):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            if all(timing.time_us is not None for timing in timed[name]):
                timed[name].append(cells[name](number))
    return {name: _together(timings) for name, timings in timed.items()}


def _together(timings: list[Timing]) -> Timing:
    times_us = [timing.time_us for timing in timings if timing.time_us is not None]
    return replace(timings[-1], time_us=median(times_us)) if len(times_us) == len(timings) else timings[-1]
