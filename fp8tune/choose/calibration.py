"""How much to measure on a device, from its own noise. Pure formulas.

``fp8tune calibrate`` stores the values of :data:`MEASURED`; a sweep derives its numbers from the newest of its device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fp8tune.choose.decision import TICK_SHARE, MeasuringPlan
from fp8tune.records import Device
from fp8tune.stats.estimate import t_quantile
from fp8tune.stats.means import median

PROCESS_SD = "process_sd"
BLOCK_SD = "block_sd"
TICK_US = "timer_tick_us"
REFERENCE_US = "reference_launch_us"
COUNTED = "calibration_processes"

MEASURED: Mapping[str, str] = {
    TICK_US: "smallest step between two samples of the timer",
    "empty_kernel_us": "a kernel that does nothing",
    "copy_ceiling_gb_per_s": "device-to-device copy of 512 MiB, read plus written",
    PROCESS_SD: "spread of a config from process to process",
    BLOCK_SD: "spread of a config from block to block in one process",
    REFERENCE_US: "colwise's default at M=16640 K=2048: tells GPUs of one name apart",
    COUNTED: "fresh processes that measured both spreads",
}
"""Name -> what it is."""

SPARE = 0.8
"""Share of the keep band that the bound between two equal configs may take up at the first decision."""

PROCESSES = (4, 12)
MORE = (2, 4, 8)
"""The later decisions have as many times the processes of the first."""
ROUNDS = (4, 6)


FULL = 20
"""Fresh processes of a calibration. With the spread of four configs over them a standard deviation is known to 10 %."""

FEWEST = 8
"""Of one that a time budget shortens: to 15 %. With fewer the protocol would hang on luck."""

START_S, PROCESS_S = 6.0, 1.9
"""What a calibration takes: seconds before its first process and for each. 44 s in all on an H200 that had not run
fp8tune before; half a minute where Triton's cache has the kernels."""

SAVED = 0.25
"""Share of the work that a calibration saves where nobody's is known: the finals begin with 6 processes without one,
and with 4 on an H100. Of the same units two H100s did 256.7 s without one, one did 192.7 s with one."""

MOST_OF_WORK = 0.05
"""A surer calibration may take this share of the time, with the look at the GPU before it: so many GPUs, each with its
own, are at least 0.95 times as many as fast as one. With a tenth two H100s spent 38 s each beside 368 s of units."""


def is_calibrated(measured: Mapping[str, float]) -> bool:
    """Whether the values are a calibration's: a sweep alone measures the copy ceiling."""
    return PROCESS_SD in measured and BLOCK_SD in measured


class Origin(StrEnum):
    """Whose calibration a device goes by."""

    OWN = "own"
    """Its own, under the driver that it has now."""
    MATES = "mates"
    """That of devices of the same name, driver and versions."""
    NONE = "none"
    """Nobody's."""


@dataclass(frozen=True)
class Known:
    """What is known of a device's noise."""

    values: Mapping[str, float]
    """By the names of :data:`MEASURED`; without a calibration perhaps a copy ceiling alone."""
    origin: Origin

    @property
    def is_whole(self) -> bool:
        """Whether it is the device's own and no time budget shortened it."""
        return self.origin is Origin.OWN and self.values.get(COUNTED, FULL) >= FULL


def known_of(device: Device, measured: Mapping[Device, Mapping[str, float]]) -> Known:
    """What a device goes by, of everything that was ``measured`` of devices of its name, the newest last.

    1. Its own calibration: first with the very versions that it has, else the newest with another torch or Triton.
       Noise is the hardware's and the driver's. A device without a UUID is known by its versions alone.
    2. That of its mates: devices of one arch, name, driver, runtime, torch and Triton. Of several the largest spread
       and tick, which ask for more rather than for less, and the median of the rest. Never what tells devices apart:
       the copy ceiling and the reference launch.
    """
    own = dict(measured.get(device, {}))
    if is_calibrated(own):
        return Known(own, Origin.OWN)
    before = [values for of, values in measured.items() if _is_same_gpu(of, device) and is_calibrated(values)]
    if before:
        return Known({**before[-1], **own}, Origin.OWN)
    mates = [values for of, values in measured.items() if are_mates(of, device) and is_calibrated(values)]
    if not mates:
        return Known(own, Origin.NONE)
    shared = {name: [values[name] for values in mates if name in values] for name in MEASURED if name not in _APART}
    taken = {name: max(values) if name in _CAUTIOUS else median(values) for name, values in shared.items() if values}
    return Known({**taken, **own}, Origin.MATES)


_APART = ("copy_ceiling_gb_per_s", REFERENCE_US, COUNTED)
_CAUTIOUS = (PROCESS_SD, BLOCK_SD, TICK_US)


def _is_same_gpu(one: Device, other: Device) -> bool:
    same = (one.arch, one.name, one.uuid_hash, one.driver) == (other.arch, other.name, other.uuid_hash, other.driver)
    return same and bool(one.uuid_hash)


def are_mates(one: Device, other: Device) -> bool:
    """Whether of all that names a device only the UUID differs: what one's noise is, the other's is likely to be."""
    return replace(one, uuid_hash="") == replace(other, uuid_hash="") and one.uuid_hash != other.uuid_hash


def takes_s(processes: int) -> float:
    """Seconds that a calibration takes: 21.2 with the fewest processes, 44 with all."""
    return START_S + PROCESS_S * processes


def processes_within(seconds: float) -> int:
    """How many processes a calibration may have so that it takes so long: all, fewer, or 0 where too few would fit."""
    fit = FULL if seconds == math.inf else int((seconds - START_S) / PROCESS_S)
    return min(fit, FULL) if fit >= FEWEST else 0


@dataclass(frozen=True)
class Allowance:
    """A calibration that is worth its time."""

    processes: int
    """0 for none."""
    seconds: float
    """When these are over it is broken off."""


def allowance(left_s: float, work_s: float, *, spent_s: float = 0.0, is_known: bool = False) -> Allowance:
    """The calibration under a time budget that leaves ``left_s``, with ``work_s`` of finals to do; infinite without.

    One that nobody has measured yet (``is_known``: else its own or its mates') saves time: it pays if it takes less
    than :data:`SAVED` of what this GPU still does, ``min(left_s - takes_s, work_s)``. The fewest processes take 21.2 s,
    so they pay with 106 s left and 85 s of work. More of them save no more, but tell the spread surer. These, and those
    beside a mate's, may take :data:`MOST_OF_WORK` of ``min(left_s, work_s)``, less ``spent_s`` that looking at the GPU
    took: all twenty with 880 s, one of its own at all with 424 s.
    """
    if left_s == math.inf:
        return Allowance(FULL, math.inf)
    surer_s = MOST_OF_WORK * min(left_s, work_s) - spent_s
    if processes := processes_within(surer_s):
        return Allowance(processes, surer_s)
    saved_s = 0.0 if is_known else SAVED * min(left_s - takes_s(FEWEST), work_s)
    return Allowance(FEWEST if takes_s(FEWEST) <= saved_s else 0, saved_s)


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
    """Return the time of which the timer's tick is 0.25 %; 0 where no tick is known.

    Below it the tick widens what a comparison proves (:func:`fp8tune.choose.decision.decide_finals`). ``tick_us``: what
    the samples at hand show.
    """
    ticks = [tick for tick in (tick_us, measured.get(TICK_US)) if tick is not None]
    return min(ticks, default=0.0) / TICK_SHARE


def _bound(one_process: float, processes: int, plan: MeasuringPlan) -> float:
    alpha = plan.alpha / ((plan.finalists - 1) * plan.decisions)
    return t_quantile(1 - alpha, processes - 1) * one_process / math.sqrt(processes)
