"""Measured noise of a device, and the measuring plan derived from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fp8tune.records import Device
from fp8tune.stats.decide import PLAN, TICK_SHARE, MeasuringPlan
from fp8tune.stats.estimate import t_quantile

PROCESS_SD = "process_sd"
BLOCK_SD = "block_sd"
TICK_US = "timer_tick_us"

SHARED = (PROCESS_SD, BLOCK_SD, TICK_US)  # values that a device may take from its peers

PROCESSES = 4, 12  # fewest and most processes for the first decision
ROUNDS = 4, 6  # fewest and most rounds of a process
MORE = 2, 4, 8  # process counts of the later decisions, as multiples of the first
SPARE = 0.8  # share of the keep band that the bound between two equal configs may reach at the first decision


def is_calibrated(values: Mapping[str, float]) -> bool:
    """Return True if the values come from a calibration; a sweep alone measures only the copy rate."""
    return PROCESS_SD in values and BLOCK_SD in values


def calibration_of(device: Device, measured: Mapping[Device, Mapping[str, float]]) -> tuple[dict[str, float], bool]:
    """Return the values to use for a device, and True if a calibration of this very GPU is among them.

    ``measured`` holds the values of all devices with the same name, oldest first. A calibration of the same GPU comes
    first, even with another version of torch or Triton, because noise depends on hardware and driver. Without one, the
    device takes the largest spreads and tick of its peers. Without peers, it has only the values from its own sweeps.
    """
    own = dict(measured.get(device, {}))
    if is_calibrated(own):
        return own, True
    calibrations = {peer: values for peer, values in measured.items() if is_calibrated(values)}
    earlier = [values for peer, values in calibrations.items() if _is_same_gpu(peer, device)]
    if earlier:
        return {**earlier[-1], **own}, True
    peers = [values for peer, values in calibrations.items() if are_peers(peer, device)]
    # The largest values ask for more processes rather than for fewer.
    largest = {name: max((values.get(name, 0.0) for values in peers), default=0.0) for name in SHARED}
    return {**{name: value for name, value in largest.items() if value}, **own}, False


def _is_same_gpu(first: Device, second: Device) -> bool:
    names = ("arch", "name", "uuid_hash", "driver")
    return bool(first.uuid_hash) and all(getattr(first, name) == getattr(second, name) for name in names)


def are_peers(first: Device, second: Device) -> bool:
    """Return True if two devices differ only in their UUID."""
    return replace(first, uuid_hash="") == replace(second, uuid_hash="") and first.uuid_hash != second.uuid_hash


def plan_for(values: Mapping[str, float], standard: MeasuringPlan = PLAN) -> MeasuringPlan:
    """Return the measuring plan for a calibrated device, or ``standard`` for a device without calibration.

    Rounds: the fewest for which block noise adds at most a quarter to the variance between processes.
    Processes: the fewest that prove two equal configs to be within the keep band at the first decision.
    Bands: keep band and tie band are widened to what the last decision can prove, the coarse band to 4 sigmas.
    """
    if not is_calibrated(values):
        return standard
    process, block = values[PROCESS_SD], values[BLOCK_SD]
    rounds = next((n for n in range(*ROUNDS) if 4 * block**2 <= n * process**2), ROUNDS[1])
    difference_sd = math.sqrt(2 * (process**2 + block**2 / rounds))
    alpha = standard.alpha / ((standard.finalists - 1) * standard.decisions)

    def bound(count: int) -> float:
        return t_quantile(1 - alpha, count - 1) * difference_sd / math.sqrt(count)

    processes = next((n for n in range(*PROCESSES) if bound(n) <= SPARE * standard.keep_band), PROCESSES[1])
    keep_band = max(standard.keep_band, bound(MORE[-1] * processes) / SPARE)
    coarse_sd = math.sqrt(2 * (process**2 + block**2 / standard.screen_rounds))
    return MeasuringPlan(
        screen_band=max(standard.screen_band, standard.screen_sigmas * coarse_sd),
        processes=processes,
        rounds=rounds,
        more_processes=tuple(times * processes for times in MORE),
        tie_band=standard.tie_band * keep_band / standard.keep_band,
        keep_band=keep_band,
    )


def floor_us(values: Mapping[str, float], tick_us: float | None) -> float:
    """Return the time of which one timer tick is 0.25 %; 0 if no tick is known.

    For shorter times, a tick widens the bounds of a comparison. ``tick_us`` is the tick seen in the current samples.
    """
    ticks = [tick for tick in (tick_us, values.get(TICK_US)) if tick is not None]
    return min(ticks, default=0.0) / TICK_SHARE
