"""Noise of a device, and the measuring plan that follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fp8tune.records import Device
from fp8tune.stats.decide import PLAN, TICK_SHARE, MeasuringPlan
from fp8tune.stats.estimate import t_quantile
from fp8tune.stats.pairs import Block, Matrix, process_values, residuals

PROCESS_SD = "process_sd"
BLOCK_SD = "block_sd"
TICK_US = "timer_tick_us"
COPY = "copy_ceiling_gb_per_s"
REFERENCE_US = "reference_launch_us"
COUNTED = "calibration_processes"

SHARED = (PROCESS_SD, BLOCK_SD, TICK_US)  # values that peers lend: none that tells devices apart

PROCESSES = 4, 12
ROUNDS = 4, 6
MORE = 2, 4, 8  # times the first processes, for later decisions
SPARE = 0.8  # of the keep band, for the bound between two equal configs at the first decision


def is_calibrated(values: Mapping[str, float]) -> bool:
    """Return True if the values are a calibration's: a sweep alone measures the copy rate."""
    return PROCESS_SD in values and BLOCK_SD in values


def calibration_of(device: Device, measured: Mapping[Device, Mapping[str, float]]) -> tuple[dict[str, float], bool]:
    """Return the values that a device uses, and True if they are its own, of all of its name, the newest last.

    Its own calibration comes first, also one with another torch or Triton: noise is the hardware's and the driver's.
    Else the largest spreads and tick of its peers, which differ in nothing but the UUID. Without any, only what sweeps
    measured of the device.
    """
    own = dict(measured.get(device, {}))
    if is_calibrated(own):
        return own, True
    calibrations = {other: values for other, values in measured.items() if is_calibrated(values)}
    earlier = [values for other, values in calibrations.items() if _is_same_gpu(other, device)]
    if earlier:
        return {**earlier[-1], **own}, True
    peers = [values for other, values in calibrations.items() if are_peers(other, device)]
    # The largest values ask for more processes rather than for fewer.
    largest = {name: max((values.get(name, 0.0) for values in peers), default=0.0) for name in SHARED}
    return {**{name: value for name, value in largest.items() if value}, **own}, False


def _is_same_gpu(first: Device, second: Device) -> bool:
    names = ("arch", "name", "uuid_hash", "driver")
    return bool(first.uuid_hash) and all(getattr(first, name) == getattr(second, name) for name in names)


def are_peers(first: Device, second: Device) -> bool:
    """Return True if two devices differ in their UUID alone."""
    return replace(first, uuid_hash="") == replace(second, uuid_hash="") and first.uuid_hash != second.uuid_hash


def plan_for(values: Mapping[str, float], standard: MeasuringPlan = PLAN) -> MeasuringPlan:
    """Return the measuring plan of a calibrated device; ``standard`` without a calibration.

    Rounds are the fewest with which blocks add at most a quarter to a process's variance. Processes are the fewest that
    prove two equal configs to be within the keep band at the first decision; where even the most do not, the keep band
    becomes what they prove, the tie band keeps its proportion to it, and that of the coarse pass is at least 4 sigmas.
    """
    if not is_calibrated(values):
        return standard
    process, block = values[PROCESS_SD], values[BLOCK_SD]
    rounds = next((n for n in range(*ROUNDS) if 4 * block**2 <= n * process**2), ROUNDS[1])
    difference = math.sqrt(2 * (process**2 + block**2 / rounds))
    alpha = standard.alpha / ((standard.finalists - 1) * standard.decisions)

    def bound(count: int) -> float:
        return t_quantile(1 - alpha, count - 1) * difference / math.sqrt(count)

    processes = next((n for n in range(*PROCESSES) if bound(n) <= SPARE * standard.keep_band), PROCESSES[1])
    keep_band = max(standard.keep_band, bound(MORE[-1] * processes) / SPARE)
    in_coarse_pass = math.sqrt(2 * (process**2 + block**2 / standard.screen_rounds))
    return MeasuringPlan(
        screen_band=max(standard.screen_band, standard.screen_sigmas * in_coarse_pass),
        processes=processes,
        rounds=rounds,
        more_processes=tuple(times * processes for times in MORE),
        tie_band=standard.tie_band * keep_band / standard.keep_band,
        keep_band=keep_band,
    )


def floor_us(values: Mapping[str, float], tick_us: float | None) -> float:
    """Return the time of which the timer's tick is 0.25 %; 0 where no tick is known.

    Below it the tick widens what a comparison proves. ``tick_us`` is the tick that the samples at hand show.
    """
    ticks = [tick for tick in (tick_us, values.get(TICK_US)) if tick is not None]
    return min(ticks, default=0.0) / TICK_SHARE


def spreads(blocks: Sequence[Block]) -> dict[str, float]:
    """Return the spreads from process to process and from block to block: standard deviations of log times.

    The blocks' spread is the median process's: now and then a block takes several times as long, and one of four times
    among 360 would make 0.5 % look like 7 %.
    """
    rows = sorted((block.process, block.config.canonical, block.round, block.time_us) for block in blocks)
    processes, configs, rounds = (len({row[place] for row in rows}) for place in range(3))
    logs = np.log([time_us for *_, time_us in rows]).reshape(processes, configs, rounds)
    block_variance = float(np.median([_variance(of_process) for of_process in logs]))
    of_processes = np.array([list(of_config.values()) for of_config in process_values(blocks).values()])
    process_variance = max(0.0, _variance(of_processes) - block_variance / rounds)
    return {PROCESS_SD: math.sqrt(process_variance), BLOCK_SD: math.sqrt(block_variance)}


def _variance(logs: Matrix) -> float:
    """Return the variance of a matrix of log times without the levels of its rows and columns."""
    return float((residuals(logs) ** 2).sum() / ((logs.shape[0] - 1) * (logs.shape[1] - 1)))
