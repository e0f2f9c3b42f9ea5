"""How much to measure on a device, from its own noise. Pure formulas.

``fp8tune calibrate`` stores the values of :data:`MEASURED`; a sweep derives its numbers from the newest of its device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fp8tune.choose.decision import MeasuringPlan
from fp8tune.stats import t_quantile

PROCESS_SD = "process_sd"
BLOCK_SD = "block_sd"
TICK_US = "timer_tick_us"
HOST_US = "host_enqueue_us"
FLUSH_US = "cache_flush_us"

MEASURED: Mapping[str, str] = {
    TICK_US: "smallest step between two samples of the timer",
    "empty_kernel_us": "a kernel that does nothing",
    HOST_US: "host time to enqueue one launch",
    FLUSH_US: "flush of the cache before each sample",
    "copy_ceiling_gb_per_s": "device-to-device copy of 512 MiB, read plus written",
    PROCESS_SD: "spread of a config from process to process",
    BLOCK_SD: "spread of a config from block to block in one process",
}
"""Name -> what it is."""

TICK_SHARE = 0.0025
"""A timer's tick may be this share of a time, no more: else two configs apart by half the tie band look the same."""

SPARE = 0.8
"""Share of the keep band that the bound between two equal configs may take up at the first decision."""

PROCESSES = (4, 12)
MORE = (2, 4, 8)
"""The later decisions have as many times the processes of the first."""
ROUNDS = (4, 6)


def is_calibrated(measured: Mapping[str, float]) -> bool:
    """Whether the values are a calibration's: a sweep alone measures the copy ceiling."""
    return PROCESS_SD in measured and BLOCK_SD in measured


def measuring_plan_of(measured: Mapping[str, float], standard: MeasuringPlan = MeasuringPlan()) -> MeasuringPlan:
    """The plan for a device; ``standard`` where it was not calibrated.

    With ``p`` and ``b`` the spreads of a config from process to process and from block to block, as shares:

    - *rounds*: 4 to 6, so many that blocks add at most a quarter to the variance of a process, ``b^2 / R <= p^2 / 4``;
    - *processes*: 4 to 12, the fewest with which two equal configs are told to be within the keep band at the first
      decision. Their difference has the standard deviation ``d = sqrt(2 (p^2 + b^2 / R))`` in one process, and its
      one-sided bound over ``n`` of them is ``t(n - 1) d / sqrt(n)`` at alpha / (challengers x decisions). It may be 4/5
      of the band;
    - *bands*: where the most processes do not get there, the keep band is what they do reach, and the tie band keeps
      its proportion to it; the screen's band is at least 4 standard deviations of a difference there.
    """
    if not is_calibrated(measured):
        return standard
    process, block = measured[PROCESS_SD], measured[BLOCK_SD]
    rounds = next((n for n in range(*ROUNDS) if 4 * block**2 <= n * process**2), ROUNDS[1])
    one_process = math.sqrt(2 * (process**2 + block**2 / rounds))
    enough = (n for n in range(*PROCESSES) if _bound(one_process, n, standard) <= SPARE * standard.keep_band)
    processes = next(enough, PROCESSES[1])
    keep_band = max(standard.keep_band, _bound(one_process, MORE[-1] * processes, standard) / SPARE)
    in_screen = math.sqrt(2 * (process**2 + block**2 / standard.screen_rounds))
    return MeasuringPlan(
        screen_band=max(standard.screen_band, standard.screen_sigmas * in_screen),
        processes=processes,
        rounds=rounds,
        more_processes=tuple(times * processes for times in MORE),
        tie_band=standard.tie_band * keep_band / standard.keep_band,
        keep_band=keep_band,
    )


def floor_us(measured: Mapping[str, float], tick_us: float | None) -> float:
    """Shorter times than this cannot be told apart here; 0 where nothing is known against it.

    Either the timer's tick is more than 0.25 % of them, or the host takes longer to enqueue a launch than the device
    takes for the flush before it and the launch itself. ``tick_us``: what the samples at hand show.
    """
    ticks = [tick for tick in (tick_us, measured.get(TICK_US)) if tick is not None]
    by_host = measured.get(HOST_US, 0.0) - measured.get(FLUSH_US, 0.0)
    return max(0.0, by_host, min(ticks, default=0.0) / TICK_SHARE)


def _bound(one_process: float, processes: int, plan: MeasuringPlan) -> float:
    alpha = plan.alpha / ((plan.finalists - 1) * plan.decisions)
    return t_quantile(1 - alpha, processes - 1) * one_process / math.sqrt(processes)
