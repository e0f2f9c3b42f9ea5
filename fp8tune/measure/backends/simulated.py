"""A simulated GPU: no process, no kernel. Times are drawn from a seeded model, :mod:`fp8tune.measure.simulated`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fp8tune.errors import UsageError
from fp8tune.measure import device
from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.engine import Screened
from fp8tune.measure.trees import Tree
from fp8tune.records import ClockLimits, Device, Kind, Outcome, Status

if TYPE_CHECKING:
    from fp8tune.measure.simulated import SimulatedClock

NUMBER = "[0-9]{1,18}"
NAME = re.compile(
    rf"simulated:(?P<seed>{NUMBER})(?:\.(?P<noise>{NUMBER}))?(?:,gpu=(?P<gpu>{NUMBER}))?"
    r"(?:,wrong=(?P<wrong>[0-9]{1,3}(?:\.[0-9]{1,9})?))?"
)


class SimulatedBackend:
    """A GPU by the name of its timer, ``simulated:SEED[.NOISE][,gpu=NUMBER][,wrong=SHARE]``. It is its own worker.

    The seed makes the kind of GPU and its true times, the noise its day. Devices of one seed have one name; ``gpu``
    tells them apart. A device may be wrong in a share of the configs.
    """

    kind = Kind.SIMULATED
    times = True
    limits = ClockLimits()

    def __init__(self, timer: str) -> None:
        """Raises UsageError for a text of another form."""
        if (name := NAME.fullmatch(timer)) is None:
            raise UsageError(f"unknown timer {timer!r}: use do_bench or simulated:SEED (a whole number)")
        self.timer = timer
        self.seed, self.noise, self.wrong = int(name["seed"]), int(name["noise"] or 0), float(name["wrong"] or 0)
        gpu = "" if name["gpu"] is None else device.hash_uuid(f"simulated:{self.seed} gpu {int(name['gpu'])}")
        self.device = Device("simulated", f"simulated:{self.seed}", uuid_hash=gpu)  # no kernel runs: no versions
        self._process = f"simulated-{os.urandom(6).hex()}"

    @cached_property
    def clock(self) -> SimulatedClock:
        """The clock that draws the times."""
        from fp8tune.measure.simulated import SimulatedClock  # it imports numpy

        return SimulatedClock(self.seed, noise_seed=self.noise)

    def worker(self, tree: Tree | None = None) -> SimulatedBackend:
        """See :class:`fp8tune.measure.engine.Backend`, also for the methods below."""
        return self

    def compile(self, arms: Sequence[KernelArm]) -> None:  # noqa: D102
        pass

    def screen(  # noqa: D102
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Screened]:
        for number, (arm, place) in enumerate(zip(arms, places, strict=True)):
            if is_over():
                return
            yield number, self.block(arm, place)

    def close(self) -> None:  # noqa: D102
        pass

    # As a worker

    def build(self, arm: Arm) -> Outcome:
        """See :class:`fp8tune.measure.engine.Worker`, also for the methods below."""
        return Outcome(Status.OK)

    launch = build

    def check(self, arm: Arm) -> Outcome:  # noqa: D102
        return self._failure(arm) or Outcome(Status.OK)

    def block(self, arm: Arm, place: Place) -> Outcome:  # noqa: D102
        return self._failure(arm) or self.clock.block(arm.work, place).outcome(self._process)

    checked_block = block

    def _failure(self, arm: Arm) -> Outcome | None:
        if self.wrong and self.clock.is_wrong(arm.work, self.device.uuid_hash, self.wrong):
            return Outcome(Status.WRONG, reason="a wrong byte of the simulated GPU", process=self._process)
        return None

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Run nothing."""
