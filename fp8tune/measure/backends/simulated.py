"""A simulated GPU: no process, no kernel. Times are drawn from a seeded model, :mod:`fp8tune.measure.simulated`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from fp8tune.errors import UsageError
from fp8tune.measure import device
from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.engine import Screened, never
from fp8tune.measure.trees import Tree
from fp8tune.records import Device, Kind, Outcome, Status

if TYPE_CHECKING:
    from fp8tune.measure.simulated import SimulatedClock

P = ParamSpec("P")
R = TypeVar("R")

OK = Outcome(Status.OK)
WRONG = "a wrong byte, as this simulated GPU makes them"
_NUMBER, _SHARE = "[0-9]{1,18}", r"[0-9]{1,3}(?:\.[0-9]{1,9})?"
NAME = re.compile(
    rf"simulated:(?P<seed>{_NUMBER})(?:\.(?P<noise>{_NUMBER}))?"
    rf"(?:,gpu=(?P<gpu>{_NUMBER}))?(?:,slower=(?P<slower>{_SHARE}))?(?:,wrong=(?P<wrong>{_SHARE}))?"
)


@dataclass(frozen=True)
class SimulatedName:
    """``simulated:SEED[.NOISE][,gpu=NUMBER][,slower=SHARE][,wrong=SHARE]``.

    The seed makes the kind of GPU and its true times, the noise its day. Devices of one seed are of one name;
    ``gpu`` tells them apart. One is slower by a share in all that it does, or wrong in a share of the configs.
    """

    seed: int
    noise: int = 0
    gpu: int | None = None
    slower: float = 0.0
    wrong: float = 0.0

    @classmethod
    def parse(cls, timer: str) -> Self:
        """Raises UsageError for a text of another form."""
        if (found := NAME.fullmatch(timer)) is None:
            raise UsageError(f"unknown timer {timer!r}: use do_bench or simulated:SEED (a whole number)")
        gpu = None if found["gpu"] is None else int(found["gpu"])
        noise, slower, wrong = int(found["noise"] or 0), float(found["slower"] or 0), float(found["wrong"] or 0)
        return cls(int(found["seed"]), noise, gpu, slower, wrong)

    @property
    def device(self) -> Device:
        """Its noise is no part of it, nor is what is wrong with it."""
        name = f"simulated:{self.seed}"
        uuid_hash = "" if self.gpu is None else device.hash_uuid(f"{name} gpu {self.gpu}")
        return replace(device.simulated_device(), name=name, uuid_hash=uuid_hash)


class SimulatedBackend:
    """A GPU by the name of its timer: :class:`SimulatedName`. It is its own worker."""

    kind = Kind.SIMULATED
    times = True

    def __init__(self, timer: str) -> None:
        """Raises UsageError for a text of another form."""
        self.name = SimulatedName.parse(timer)
        self.timer = timer
        self.device = self.name.device
        self._process = f"simulated-{os.urandom(6).hex()}"

    @cached_property
    def clock(self) -> SimulatedClock:
        """What draws the times; it imports numpy."""
        from fp8tune.measure.simulated import SimulatedClock

        return SimulatedClock(self.name.seed, noise_seed=self.name.noise, level=1 + self.name.slower)

    def copy_gb_per_s(self) -> float:
        """See :class:`fp8tune.measure.engine.Backend`, as of all that follows."""
        return self.clock.copy_gb_per_s(self.device.uuid_hash)

    def worker(self, tree: Tree | None = None) -> SimulatedBackend:  # noqa: D102
        return self

    def compile(self, arms: Sequence[KernelArm], *, with_edges: bool = True) -> None:  # noqa: D102
        pass

    def finish_compiling(self) -> None:  # noqa: D102
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

    launch = build

    def check(self, arm: KernelArm, *, with_edges: bool = True) -> Outcome:  # noqa: D102
        is_wrong = self.clock.is_wrong(arm.work, self.device.uuid_hash, self.name.wrong)
        return Outcome(Status.WRONG, reason=WRONG, process=self._process) if is_wrong else OK

    def block(self, arm: Arm, place: Place) -> Outcome:  # noqa: D102
        if self.clock.is_wrong(arm.work, self.device.uuid_hash, self.name.wrong):
            return Outcome(Status.WRONG, reason=WRONG, process=self._process)
        return self.clock.block(arm.work, place).outcome(self._process)

    checked_block = block

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Nothing runs here."""

    def close(self) -> None:  # noqa: D102
        pass
