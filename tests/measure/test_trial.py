"""What a screen asks of its clock."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from places import PLANTED

from fp8tune.measure.arms import KernelArm
from fp8tune.measure.checking import TOO_SLOW_RATIO
from fp8tune.measure.timing import Samples
from fp8tune.measure.trial import checked_block
from fp8tune.records import NamedInts, Problem

ARM = KernelArm(
    f"{PLANTED / 'launches.py'}:SPEC",
    Problem("planted-launches", NamedInts(M=6, K=17)),
    NamedInts(FAULT=0, num_warps=4),
)


def test_only_the_first_round_gives_up_on_a_config() -> None:
    """Three launches that a machine stalled once passed for a slow config in its third round: two blocks said 268 us,
    and the estimate 585 us."""
    told: list[float | None] = []

    def clock(launch: Callable[[], object], too_slow_us: float | None) -> Samples:
        """Takes 100 us for everything, and keeps what it is told."""
        launch()
        told.append(too_slow_us)
        return Samples((100.0,), None)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number in (0, 0, 1, 2):
        checked_block(ARM, device, number, clock=clock)
    assert told == [math.inf, TOO_SLOW_RATIO * 100, None, None]
