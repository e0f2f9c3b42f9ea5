"""Calibration of a device: the noise of its blocks and processes, measured as a confirmation measures.

Fresh processes time a few configs of one kernel in permuted rounds. Noise is what is left of a time without the levels
of its process and config.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from fp8tune.errors import MachineError
from fp8tune.measure import device as devices
from fp8tune.measure import trial
from fp8tune.measure.arms import Arm, KernelArm, Place, Work
from fp8tune.measure.engine import Backend, Group, Schedule, measure
from fp8tune.plan import grids
from fp8tune.records import Device, NamedInts, Outcome, Problem, Progress, Status
from fp8tune.replay.loading import load_spec
from fp8tune.stats.calibration import COPY, COUNTED, REFERENCE_US, TICK_US, plan_for, spreads
from fp8tune.stats.decide import MeasuringPlan
from fp8tune.stats.pairs import Block, process_values
from fp8tune.store.results import Store

PROCESSES = 20
"""With the spread of four configs over 20 processes a standard deviation is known to 10 %. They take 44 s."""
ROUNDS = 6
KERNEL, SHAPE = "colwise", NamedInts(M=16640, K=2048, G=4)
"""80 us on an H100: a tick or a launch is small beside it."""


@dataclass(frozen=True)
class Calibration:
    """Measured values of a device, and the protocol that follows."""

    device: Device
    values: dict[str, float]
    protocol: MeasuringPlan


@dataclass(frozen=True)
class EmptyKernel(Arm):
    """A kernel that does nothing."""

    @property
    def work(self) -> Work:
        """Return work without bytes."""
        return Work("empty kernel", 0)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """Return a launch of one program."""
        import torch
        import triton

        @triton.jit
        def empty(pointer):  # type: ignore[no-untyped-def]  # (1,)
            pass

        pointer = torch.zeros(1, device=torch_device)
        return lambda: empty[(1,)](pointer)


def arms_of(backend: Backend) -> list[KernelArm]:
    """Return the declared default, and for each axis the first config that differs from it in this axis only."""
    spec = load_spec(KERNEL)
    problem = Problem(spec.name, SHAPE, "balanced")
    grid = grids.configs(spec, problem, spec.axes, devices.limits(backend.device))
    tried = [config for config, pruned in grid.items() if not pruned]
    near = [[c for c in tried if {name for name in c if c[name] != spec.default[name]} == {axis}] for axis in spec.axes]
    configs = dict.fromkeys([spec.default, *(found[0] for found in near if found)])
    return [KernelArm.of(KERNEL, spec, problem, config) for config in configs]


def calibrate(
    store: Store, backend: Backend, *, command: str = "", commit: str = ""
) -> Iterator[Progress | Calibration]:
    """Measure and store; the last event is the result.

    Raises:
        MachineError: Nothing can be timed here.
    """
    if not backend.times:
        raise MachineError("there is no GPU here to calibrate; --timer simulated:SEED calibrates a fake one")
    timer, device = backend.timer, backend.device
    sweep = store.begin_sweep("calibrate", device, command=command, commit=commit, timer=timer, seed=0)
    try:
        arms, values, blocks, ticks_us = arms_of(backend), _idle(backend), list[Block](), list[float]()
        for turn in measure(backend, [Group(None, arms)], Schedule(range(1, PROCESSES + 1), ROUNDS, _order)):
            for failed in turn.failed:
                reason = f"{failed.outcome.status}, {failed.outcome.reason}"
                raise MachineError(f"{KERNEL} {failed.arm.config} cannot be timed: {reason}")
            for block in turn.blocks:
                time_us, process = _time_us(block.outcome), f"{turn.process:02d}"
                blocks.append(Block(process, block.place.round, block.arm.config, time_us))
                ticks_us += [] if block.outcome.tick_us is None else [block.outcome.tick_us]
            yield Progress(turn.process, PROCESSES, 0.0)
        values |= {TICK_US: min(ticks_us)} if ticks_us else {}
        values |= spreads(blocks) | {REFERENCE_US: reference_us(blocks, arms[0].config)}
        values[COUNTED] = float(len({block.process for block in blocks}))
        for name, value in values.items():
            store.record_calibration(sweep, device, name, value)
    finally:
        store.finish_sweep(sweep)
    yield Calibration(device, values, plan_for(values))


def reference_us(blocks: Sequence[Block], config: NamedInts) -> float:
    """Return a config's time: the geometric mean over processes."""
    return math.exp(fmean(process_values(blocks)[config].values()))


def _idle(backend: Backend) -> dict[str, float]:
    """Time an empty kernel and a copy."""
    worker, empty = backend.worker(), EmptyKernel()
    try:
        worker.launch(empty)
        values = {"empty_kernel_us": _time_us(worker.block(empty, Place()))}
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
