"""A simulated GPU: no process, no kernel. Times are drawn from a seeded model, :mod:`fp8tune.measure.simulated`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from fp8tune.errors import UsageError
from fp8tune.measure import device
from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.engine import Screened, never
from fp8tune.measure.trees import Tree
from fp8tune.records import Kind, Outcome, Status

if TYPE_CHECKING:
    from fp8tune.measure.simulated import SimulatedClock

P = ParamSpec("P")
R = TypeVar("R")

OK = Outcome(Status.OK)
NAME = re.compile(r"simulated:([0-9]{1,18})(?:\.([0-9]{1,18}))?")


class SimulatedBackend:
    """``simulated:SEED``, or ``simulated:SEED.NOISE``: the same GPU on another day. It is its own worker."""

    kind = Kind.SIMULATED
    times = True

    def __init__(self, timer: str) -> None:
        """Raises UsageError for a text of another form."""
        if NAME.fullmatch(timer) is None:
            raise UsageError(f"unknown timer {timer!r}: use do_bench or simulated:SEED (a whole number)")
        self.timer = timer
        self.device = replace(device.simulated_device(), name=timer.partition(".")[0])  # the noise is no part of it
        self._process = f"simulated-{os.urandom(6).hex()}"

    @cached_property
    def clock(self) -> SimulatedClock:
        """What draws the times; it imports numpy."""
        from fp8tune.measure.simulated import SimulatedClock

        seed, _, noise_seed = self.timer.partition(":")[2].partition(".")
        return SimulatedClock(int(seed), noise_seed=int(noise_seed or 0))

    def worker(self, tree: Tree | None = None) -> SimulatedBackend:
        """See :class:`fp8tune.measure.engine.Backend`, as of all that follows."""
        return self

    def compile(self, arms: Sequence[KernelArm]) -> None:  # noqa: D102
        pass

    def screen(  # noqa: D102
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = never
    ) -> Iterator[Screened]:
        for number, (arm, place) in enumerate(zip(arms, places, strict=True)):
            if is_over():
                return
            yield number, self.block(arm, place)

    # As a worker

    def build(self, arm: Arm) -> Outcome:
        """See :class:`fp8tune.measure.engine.Worker`, as of all that follows."""
        return OK

    launch = check = build

    def block(self, arm: Arm, place: Place) -> Outcome:  # noqa: D102
        return self.clock.block(arm.work, place).outcome(self._process)

    checked_block = block

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Nothing runs here."""

    def close(self) -> None:  # noqa: D102
        pass
