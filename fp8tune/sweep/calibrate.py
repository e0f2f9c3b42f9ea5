"""Calibration of a device: its noise, measured as the finals measure, and stored in the database.

Twenty fresh processes time the same few configs of one kernel in permuted rounds. Noise is the rest of a time without
the levels of its process and config: what stays while a process lives, and what changes block by block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from fp8tune.errors import MachineError
from fp8tune.measure import device, trial
from fp8tune.measure.arms import Arm, KernelArm, Place, Work
from fp8tune.measure.engine import Backend, Group, Schedule, Worker, measure
from fp8tune.plan import problems as plan
from fp8tune.records import Device, NamedInts, Outcome, Problem, Progress, Status
from fp8tune.replay.loading import load_spec
from fp8tune.stats.calibration import COPY, COUNTED, REFERENCE_US, TICK_US, plan_for, spreads
from fp8tune.stats.decide import MeasuringPlan
from fp8tune.stats.pairs import Block, process_values
from fp8tune.store.results import Store

PROCESSES = 20
"""Fresh processes: with the spread of four configs over them a standard deviation is known to 10 %. They take 44 s."""
ROUNDS = 6
KERNEL = "colwise"
SHAPE = NamedInts(M=16640, K=2048, G=4)
"""Some 80 us on an H100: a tick or a launch is small beside it, twenty processes take half a minute."""

REQUEST = "calibrate"


@dataclass(frozen=True)
class Calibration:
    """What was measured of a device, and the protocol that follows."""

    device: Device
    values: dict[str, float]
    protocol: MeasuringPlan


@dataclass(frozen=True)
class EmptyKernel(Arm):
    """A kernel that does nothing."""

    @property
    def work(self) -> Work:
        """None, in so many bytes."""
        return Work("empty kernel", 0)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """One program."""
        import torch
        import triton

        @triton.jit
        def empty(pointer):  # type: ignore[no-untyped-def]  # (1,)
            pass

        pointer = torch.zeros(1, device=torch_device)
        return lambda: empty[(1,)](pointer)


def arms_of(backend: Backend) -> list[KernelArm]:
    """The declared default, and for each axis the default with another of its values: the nearest configs there are.

    Imports torch and the kernel.
    """
    return list(_arms(backend.device))


@lru_cache(maxsize=1)  # asked for two or three times before the first unit; 60 ms
def _arms(of: Device) -> Sequence[KernelArm]:
    spec = load_spec(KERNEL)
    problem = Problem(spec.name, SHAPE, "balanced")
    found = plan.configs(spec, problem, spec.axes, device.limits(of))
    tried = [config for config, pruned in found.items() if not pruned]
    near = [next((c for c in tried if {n for n in c if c[n] != spec.default[n]} == {axis}), None) for axis in spec.axes]
    configs = dict.fromkeys([spec.default, *(config for config in near if config is not None)])
    return [KernelArm.of(KERNEL, spec, problem, config) for config in configs]


def calibrate(
    store: Store,
    backend: Backend,
    *,
    command: str = "",
    commit: str = "",
) -> Iterator[Progress | Calibration]:
    """Measure and store; the last event is the result.

    Raises:
        MachineError: Nothing can be timed here.
    """
    if not backend.times:
        raise MachineError("there is no GPU here to calibrate; --timer simulated:SEED calibrates a fake one")
    sweep = store.begin_sweep(REQUEST, backend.device, command=command, commit=commit, timer=backend.timer, seed=0)
    try:
        values: dict[str, float] = {}
        for event in _measured(backend):
            if isinstance(event, Progress):
                yield event
            else:
                values = event
        for name, value in values.items():
            store.record_calibration(sweep, backend.device, name, value)
    finally:
        store.finish_sweep(sweep)
    yield Calibration(backend.device, values, plan_for(values))


def _measured(backend: Backend) -> Iterator[Progress | dict[str, float]]:
    """Yield progress, and at the end the values."""
    arms = arms_of(backend)
    values = _idle(backend.worker())
    blocks: list[Block] = []
    ticks_us: list[float] = []
    schedule = Schedule(range(1, PROCESSES + 1), ROUNDS, _order)
    for turn in measure(backend, [Group(None, arms)], schedule):
        for arm, outcome in ((failed.arm, failed.outcome) for failed in turn.failed):
            raise MachineError(f"{KERNEL} {arm.config} cannot be timed: {outcome.status}, {outcome.reason}")
        for block in turn.blocks:
            blocks.append(Block(f"{turn.process:02d}", block.place.round, block.arm.config, _time_us(block.outcome)))
            ticks_us += [] if block.outcome.tick_us is None else [block.outcome.tick_us]
        yield Progress(turn.process, PROCESSES, 0.0)
    counted = len({block.process for block in blocks})
    values |= {TICK_US: min(ticks_us)} if ticks_us else {}
    values |= spreads(blocks)
    yield values | {REFERENCE_US: reference_us(blocks, arms[0].config), COUNTED: float(counted)}


def reference_us(blocks: Sequence[Block], config: NamedInts) -> float:
    """A config's time: the geometric mean over processes."""
    return math.exp(fmean(process_values(blocks)[config].values()))


def _idle(worker: Worker) -> dict[str, float]:
    try:
        worker.launch(EmptyKernel())
        values = {"empty_kernel_us": _time_us(worker.block(EmptyKernel(), Place()))}
        copy_gb_per_s = worker.run(trial.copy_ceiling_gb_per_s)
        return values if copy_gb_per_s is None else values | {COPY: copy_gb_per_s}
    finally:
        worker.close()


def _time_us(outcome: Outcome) -> float:
    if outcome.time_us is None or outcome.status is not Status.OK:
        raise MachineError(f"nothing can be timed here: {outcome.status}, {outcome.reason}")
    return outcome.time_us


def _order(group: Group[KernelArm, None], process: int, round: int) -> list[KernelArm]:
    return random.Random(f"calibrate {process - 1} {round}").sample(group.arms, len(group.arms))
