"""``fp8tune calibrate``: what this device's own noise is, measured as the finals measure, and kept in the database.

Twenty fresh processes time the same few configs of one kernel in permuted rounds. Noise is what is left of a time
without the process's level and the config's own: what stays while a process lives, and what changes block by block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from fp8tune.choose.calibration import (
    BLOCK_SD,
    COUNTED,
    FEWEST,
    FULL,
    PROCESS_SD,
    REFERENCE_US,
    TICK_US,
    measuring_plan_of,
)
from fp8tune.choose.decision import Block, MeasuringPlan, process_values
from fp8tune.errors import MachineError
from fp8tune.measure import device, trial
from fp8tune.measure.arms import Arm, KernelArm, Place, Work
from fp8tune.measure.engine import Backend, Group, Schedule, Worker, measure, never
from fp8tune.plan import problems as plan
from fp8tune.records import Device, NamedInts, Outcome, Problem, Progress, Status
from fp8tune.replay.loading import load_spec
from fp8tune.store.results import Store

PROCESSES = FULL
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
    processes: int = PROCESSES,
    is_over: Callable[[], bool] = never,
) -> Iterator[Progress | Calibration]:
    """Measure and store; the last event is the result. Raises MachineError where nothing can be timed here.

    ``is_over`` is asked before each process. If it stops them before :data:`FEWEST` nothing is stored, and there is no
    result. While it measures, :meth:`fp8tune.store.results.Store.at_work` tells others so.
    """
    if not backend.times:
        raise MachineError("there is no GPU here to calibrate; --timer simulated:SEED calibrates a fake one")
    sweep = store.begin_sweep(REQUEST, backend.device, command=command, commit=commit, timer=backend.timer, seed=0)
    try:
        values: dict[str, float] = {}
        for event in _measured(backend, processes, is_over):
            if isinstance(event, Progress):
                yield event
            else:
                values = event
        for name, value in values.items():
            store.record_calibration(sweep, backend.device, name, value)
    finally:
        store.finish_sweep(sweep)
    if values:
        yield Calibration(backend.device, values, measuring_plan_of(values))


def _measured(backend: Backend, processes: int, is_over: Callable[[], bool]) -> Iterator[Progress | dict[str, float]]:
    """Progress, and at the end the values, unless ``is_over`` came too early."""
    arms = arms_of(backend)
    values = _idle(backend.worker())
    blocks: list[Block] = []
    ticks_us: list[float] = []
    schedule = Schedule(range(1, processes + 1), ROUNDS, _order, is_over=is_over)
    for turn in measure(backend, [Group(None, arms)], schedule):
        for arm, outcome in ((failed.arm, failed.outcome) for failed in turn.failed):
            raise MachineError(f"{KERNEL} {arm.config} cannot be timed: {outcome.status}, {outcome.reason}")
        for block in turn.blocks:
            blocks.append(Block(f"{turn.process:02d}", block.place.round, block.arm.config, _time_us(block.outcome)))
            ticks_us += [] if block.outcome.tick_us is None else [block.outcome.tick_us]
        yield Progress(turn.process, processes, 0.0)
    counted = len({block.process for block in blocks})
    if counted < min(FEWEST, processes):
        return
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
        return values if copy_gb_per_s is None else values | {"copy_ceiling_gb_per_s": copy_gb_per_s}
    finally:
        worker.close()


def _time_us(outcome: Outcome) -> float:
    if outcome.time_us is None or outcome.status is not Status.OK:
        raise MachineError(f"nothing can be timed here: {outcome.status}, {outcome.reason}")
    return outcome.time_us


def _order(group: Group[KernelArm, None], process: int, round: int) -> list[KernelArm]:
    return random.Random(f"calibrate {process - 1} {round}").sample(group.arms, len(group.arms))


def spreads(blocks: Sequence[Block]) -> dict[str, float]:
    """From process to process and from block to block, as shares (standard deviations of log times).

    The blocks' is the median process's: now and then a block takes several times as long, and one of four times among
    the 360 would make 0.5 % look like 7 %.
    """
    block_variance = float(np.median([_left_over(logs) for logs in _by_process(blocks)]))
    of_processes = np.array([list(of_config.values()) for of_config in process_values(blocks).values()])
    process_variance = max(0.0, _left_over(of_processes) - block_variance / ROUNDS)
    return {PROCESS_SD: process_variance**0.5, BLOCK_SD: block_variance**0.5}


def _by_process(blocks: Sequence[Block]) -> Iterator[NDArray[np.float64]]:
    """(config, round) -> log time, a matrix for each process."""
    for process in sorted({block.process for block in blocks}):
        mine = sorted((b.config.canonical, b.round, b.time_us) for b in blocks if b.process == process)
        yield np.log([time_us for *_, time_us in mine]).reshape(-1, ROUNDS)


def _left_over(logs: NDArray[np.float64]) -> float:
    """The variance in a matrix of log times once the levels of its rows and of its columns are taken away."""
    residuals = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    return float((residuals**2).sum() / ((logs.shape[0] - 1) * (logs.shape[1] - 1)))
