"""Rows, a GPU and contenders that nothing runs, for the tests of `fp8tune bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from places import PLANTED

from fp8tune.bench import kernel_contenders
from fp8tune.bench import kernels as bench
from fp8tune.bench.cells import Contender, Timing
from fp8tune.bench.checking import Checked, Part
from fp8tune.bench.kernels import Kernel, Row
from fp8tune.bench.options import BenchOptions
from fp8tune.measure.arms import Place, Work
from fp8tune.measure.backends.gpu import GpuBackend
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.records import Device, NamedInts, Outcome, Problem

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"


def simulated(
    *kernels: str,
    time_budget_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> list[Row | Kernel]:
    backend = SimulatedBackend("simulated:1")
    wanted = bench.planned(BenchOptions(kernels=kernels, shapes=("tiny",), **options), backend)
    return list(bench.run(backend, wanted, time_budget_s, clock))


WRONG = Checked(Part(84, 100), Part(31, 100))


def row(ours_us: float | None, copy_us: float | None, wrong: str = "", **rivals_us: float | None) -> Row:
    """A problem of 3 MB; ``wrong`` names the contender whose output is."""
    timings = {name: Timing(us, "" if us else "planted") for name, us in {"fp8tune": ours_us, **rivals_us}.items()}
    if wrong:
        timings[wrong] = replace(timings[wrong], reason=WRONG.wrong, checked=WRONG)
    problem = Problem("colwise", NamedInts(M=1000, K=1000, G=2), "jagged")
    return Row(problem, Device("sm_90", "a GPU"), 3_000_000, Timing(copy_us), timings)


COPY_US = 2 * kernel_contenders.COPIED_BYTES / 2000 / 1e3
"""A copy at 2,000 GB/s."""


TorchAo = Callable[[str, Callable[..., Any]], None]


@dataclass(frozen=True)
class Named(Contender):
    """A contender that nothing runs."""

    @property
    def work(self) -> Work:
        return Work(self.name, 1000)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        raise AssertionError("no process runs it")

    def check(self) -> Timing:
        return Timing(reason=f"{self.name} is checked")


PROBLEM = Problem("colwise", NamedInts(M=1000, K=1000, G=2), "jagged")


@dataclass
class FakeGpu:
    """A back end and worker in one: answers are planned, questions are kept."""

    outcomes: Callable[[str, str, int], Outcome]
    """(step, name, round) -> outcome."""
    times: bool = True
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    device: Device = field(default_factory=lambda: Device("sm_90", "a GPU"))

    def worker(self, tree: object = None) -> FakeGpu:
        return self

    def build(self, arm: Named) -> Outcome:
        return self._answer("build", arm)

    def launch(self, arm: Named) -> Outcome:
        return self._answer("launch", arm)

    def block(self, arm: Named, place: Place) -> Outcome:
        return self._answer("block", arm, place.round)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.asked.append((function.__name__, getattr(arguments[0], "name", ""), 0))
        return function(*arguments)

    def close(self) -> None:
        pass

    def _answer(self, step: str, arm: Named, round: int = 0) -> Outcome:
        self.asked.append((step, arm.name, round))
        return self.outcomes(step, arm.name, round)


def without_a_gpu() -> GpuBackend:
    """Real workers, on the CPU."""
    return GpuBackend(Device("sm_90", "a GPU"), None, torch_device="cpu", timeout_s=60.0)
