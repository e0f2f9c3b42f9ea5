"""``fp8tune calibrate``: what this device's own noise is, measured as the finals measure, and kept in the database.

Twenty fresh worker processes time the same few configs of one kernel in permuted rounds. What is left of a config's
time once the process' level and the config's own are taken away is noise, split into what stays the same while a
process lives and what changes from block to block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fp8tune.calibrate import probing
from fp8tune.choose.calibration import BLOCK_SD, PROCESS_SD, TICK_US, measuring_plan_of
from fp8tune.choose.decision import Block, MeasuringPlan, process_values
from fp8tune.errors import MachineError
from fp8tune.measure.clock import Slot
from fp8tune.measure.laboratory import Batch, Laboratory, OpenLaboratory
from fp8tune.records import Device, NamedInts, Outcome, Status
from fp8tune.store.results import Store

PROCESSES = 20
ROUNDS = 6
KERNEL = "colwise"
SHAPE = NamedInts(M=16640, K=2048, G=4)
"""Some 80 us on an H100: a tick or a launch is small beside it, twenty processes take half a minute."""

REQUEST = "calibrate"


@dataclass(frozen=True)
class Progress:
    """So many of the processes are done."""

    done: int
    total: int


@dataclass(frozen=True)
class Calibration:
    """What was measured of a device, and the protocol that follows."""

    device: Device
    values: dict[str, float]
    protocol: MeasuringPlan


@dataclass
class _Spread:
    """Blocks of some configs in some processes."""

    blocks: list[Block] = field(default_factory=list)
    ticks_us: list[float] = field(default_factory=list)

    def add(self, process: int, round: int, config: NamedInts, outcome: Outcome) -> None:
        if outcome.time_us is not None:
            self.blocks.append(Block(f"{process:02d}", round, config, outcome.time_us))
        if outcome.tick_us is not None:
            self.ticks_us.append(outcome.tick_us)

    def values(self) -> dict[str, float]:
        """The spreads as shares (standard deviations of log times), and the smallest tick seen.

        The blocks' is the median process's: now and then a block takes several times as long, and one of four times
        among the 360 would make 0.5 % look like 7 %.
        """
        block_variance = float(np.median([_left_over(logs) for logs in self._by_process()]))
        of_processes = np.array([list(of_config.values()) for of_config in process_values(self.blocks).values()])
        process_variance = max(0.0, _left_over(of_processes) - block_variance / ROUNDS)
        tick = {TICK_US: min(self.ticks_us)} if self.ticks_us else {}
        return {**tick, PROCESS_SD: process_variance**0.5, BLOCK_SD: block_variance**0.5}

    def _by_process(self) -> Iterator[NDArray[np.float64]]:
        for process in sorted({block.process for block in self.blocks}):
            mine = sorted((b.config.canonical, b.round, b.time_us) for b in self.blocks if b.process == process)
            logs = np.log([time_us for *_, time_us in mine])
            yield logs.reshape(-1, ROUNDS)


def _left_over(logs: NDArray[np.float64]) -> float:
    """The variance in a matrix of log times once the levels of its rows and of its columns are taken away."""
    residuals = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    return float((residuals**2).sum() / ((logs.shape[0] - 1) * (logs.shape[1] - 1)))


def configs_of(batch: Batch) -> tuple[NamedInts, ...]:
    """The declared default, and for each axis the default with another of its values: the nearest configs there are."""
    default, planned = batch.version.default, {trial.config: trial.pruned for trial in batch.trials}
    near = [
        next((c for c in planned if planned[c] is None and {n for n in c if c[n] != default[n]} == {axis}), None)
        for axis, _ in batch.version.axes
    ]
    return (default, *dict.fromkeys(config for config in near if config is not None))


def calibrate(
    store: Store, laboratory: Laboratory, batch: Batch, *, command: str = "", commit: str = ""
) -> Iterator[Progress | Calibration]:
    """Measure and store; the last event is the result. Raises MachineError where nothing can be timed here."""
    if not laboratory.times:
        raise MachineError("there is no GPU here to calibrate; --timer simulated:SEED calibrates a fake one")
    configs, spread = configs_of(batch), _Spread()
    arguments = (batch.reference, batch.problem, batch.version.default, laboratory.timer, laboratory.torch_device)
    with OpenLaboratory(laboratory) as lab:
        values = lab.runners.submit(lab.trial_timeout_s, probing.idle_values, *arguments).result()
        for process in range(PROCESSES):
            lab.fresh_runner()
            _time(lab, batch, configs, process, spread)
            yield Progress(process + 1, PROCESSES)
    values |= spread.values()
    _keep(store, laboratory, values, command, commit)
    yield Calibration(laboratory.device, values, measuring_plan_of(values))


def _time(lab: OpenLaboratory, batch: Batch, configs: Sequence[NamedInts], process: int, spread: _Spread) -> None:
    for round in range(ROUNDS):
        shuffled = random.Random(f"calibrate {process} {round}").sample(configs, len(configs))
        for position, config in enumerate(shuffled):
            outcome = lab.run_final(batch, config, Slot(process + 1, round, position))
            if outcome.status is not Status.OK:
                raise MachineError(
                    f"{batch.problem.kernel} {config} cannot be timed: {outcome.status}, {outcome.reason}"
                )
            spread.add(process, round, config, outcome)


def _keep(store: Store, laboratory: Laboratory, values: dict[str, float], command: str, commit: str) -> None:
    sweep = store.begin_sweep(
        REQUEST, laboratory.device, command=command, commit=commit, timer=laboratory.timer, seed=0
    )
    for name, value in values.items():
        store.record_calibration(sweep, laboratory.device, name, value)
    store.finish_sweep(sweep)
