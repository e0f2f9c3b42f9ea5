"""GPUs of one name that are not alike: how much slower than its mates one is in all that it does. Pure functions.

*Mates* are devices that differ in nothing but the UUID. What a device takes for something is compared with the median
of what its mates take for the same. Three things are: the problems whose configs several of them timed, of which each
is one value; the reference launch of a calibration; and the copy. A device differs where one of them proves that it
does by more than the tie band.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from fp8tune.choose.calibration import BLOCK_SD, COUNTED, FULL, PROCESS_SD, REFERENCE_US
from fp8tune.choose.decision import MeasuringPlan
from fp8tune.choose.ranking import grouped
from fp8tune.records import Device, Evidence, Kind, NamedInts, Problem, Status
from fp8tune.stats.estimate import Estimate, estimate
from fp8tune.stats.means import median

COPY = "copy_ceiling_gb_per_s"

COPY_SD = 0.002
"""Standard deviation of a log copy ceiling from process to process. Of 15 H100s and H200s none had more than 0.16 %."""

FEWEST_PROBLEMS = 5
"""That prove anything: one may be fast on a device by luck."""

BAND = MeasuringPlan().tie_band
ALPHA = 0.025
"""Chance that a device which is alike is named, of each thing that is compared."""

MANY = 1000.0
"""Degrees of freedom of a spread that is known."""


class Question(NamedTuple):
    """What the same time is expected for on each mate."""

    problem: Problem
    config: NamedInts
    source_hash: str
    stage: str


@dataclass(frozen=True)
class Level:
    """One device beside its mates."""

    device: Device
    mates: int
    slower: Estimate
    """Log of its times over theirs, of what proves it."""
    problems: int
    """Timed by others of its name too."""
    says_reference: bool
    """Whether the reference launch of its calibration says the same."""
    says_copy: bool
    """Whether the copy does."""

    @property
    def sources(self) -> str:
        """``copy ceiling, 40 problems``."""
        found = ["copy ceiling"] * self.says_copy + ["calibration"] * self.says_reference
        if self.problems:
            found.append("1 problem" if self.problems == 1 else f"{self.problems} problems")
        return ", ".join(found)


def levels(
    evidence: Iterable[Evidence], measured: Mapping[Device, Mapping[str, float]], band: float = BAND
) -> list[Level]:
    """The devices that differ from their mates by more than ``band``, those that are most off first.

    ``measured``: the newest values of calibrations and sweeps, as the store gives them.
    """
    times = _times(evidence)
    devices = {*measured, *(device for of in times.values() for device in of)}
    families = grouped(sorted(devices, key=_order), lambda of: replace(of, uuid_hash=""))
    found: list[Level] = []
    for family in families.values():
        mates = [device for device in family if device.uuid_hash]
        while off := _most_off(mates, times, measured, band):  # beside it the others would seem to be off, too
            found.append(off)
            mates.remove(off.device)
    return sorted(found, key=lambda level: (-abs(level.slower.mean), _order(level.device)))


def _most_off(
    mates: Sequence[Device],
    times: Mapping[Question, Mapping[Device, float]],
    measured: Mapping[Device, Mapping[str, float]],
    band: float,
) -> Level | None:
    """The device that is most off; of two that differ from each other the slower one."""
    found = [level for device in mates if (level := _level(device, {*mates} - {device}, times, measured, band))]
    return max(found, key=lambda level: (round(abs(level.slower.mean), 9), level.slower.mean), default=None)


def _level(
    device: Device,
    mates: set[Device],
    times: Mapping[Question, Mapping[Device, float]],
    measured: Mapping[Device, Mapping[str, float]],
    band: float,
) -> Level | None:
    problems = list(_by_problem(device, mates, times))
    of_problems = estimate(problems) if len(problems) >= FEWEST_PROBLEMS else None
    own, others = measured.get(device, {}), [measured[mate] for mate in sorted(mates & measured.keys(), key=_order)]
    reference, copy = _reference(own, others), _copy(own, others)
    proof = next((each for each in (of_problems, reference, copy) if each and _is_beyond(each, band)), None)
    if proof is None:
        return None

    def says(other: Estimate | None) -> bool:
        return other is not None and other.mean * proof.mean > 0 and abs(other.mean) >= math.log1p(band) / 2

    return Level(device, len(mates), proof, len(problems) if says(of_problems) else 0, says(reference), says(copy))


def _is_beyond(slower: Estimate, band: float) -> bool:
    edge = math.log1p(band)
    return slower.lower(ALPHA) > edge or slower.upper(ALPHA) < -edge


def _by_problem(
    device: Device, mates: set[Device], times: Mapping[Question, Mapping[Device, float]]
) -> Iterator[float]:
    """Of each problem the mean log of the device's times over the median of its mates'."""
    found: dict[Problem, list[float]] = {}
    for question, of in times.items():
        theirs = [logs for mate, logs in of.items() if mate in mates]
        if device in of and theirs:
            found.setdefault(question.problem, []).append(of[device] - median(theirs))
    return (fmean(logs) for logs in found.values())


def _reference(own: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> Estimate | None:
    theirs = [each for each in others if REFERENCE_US in each]
    if REFERENCE_US not in own or not theirs:
        return None
    mean = math.log(own[REFERENCE_US]) - median(math.log(each[REFERENCE_US]) for each in theirs)
    variance = _variance(own) + fmean(map(_variance, theirs)) / len(theirs)
    return Estimate(mean, math.sqrt(variance), own.get(COUNTED, FULL) - 1)


def _variance(calibration: Mapping[str, float]) -> float:
    """Of the log of a reference launch: a mean over processes, each of which has six rounds."""
    each = calibration.get(PROCESS_SD, 0.0) ** 2 + calibration.get(BLOCK_SD, 0.0) ** 2 / 6
    return each / calibration.get(COUNTED, FULL)


def _copy(own: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> Estimate | None:
    theirs = [math.log(each[COPY]) for each in others if COPY in each]
    if COPY not in own or not theirs:
        return None
    return Estimate(median(theirs) - math.log(own[COPY]), COPY_SD * math.sqrt(1 + 1 / len(theirs)), MANY)


def _times(evidence: Iterable[Evidence]) -> dict[Question, dict[Device, float]]:
    """The mean log microseconds of each config that was timed, by device."""
    found: dict[Question, dict[Device, float]] = {}
    for entry in evidence:
        if entry.kind in (Kind.MEASURED, Kind.SIMULATED) and entry.status is Status.OK and entry.times_us:
            config, version = entry.config or NamedInts(), entry.version
            question = Question(entry.problem, config, version.source_hash if version else "", entry.stage)
            found.setdefault(question, {})[entry.device] = fmean(map(math.log, entry.times_us))
    return {question: of for question, of in found.items() if len(of) > 1}


def _order(device: Device) -> str:
    return device.fingerprint
