"""Filters and order of the picks that ``show`` and ``explain`` print. Imports nothing that takes time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fp8tune.ceiling import ceiling_of
from fp8tune.errors import UsageError, unknown
from fp8tune.records import Device, Problem
from fp8tune.stats.study import Study, Verdict


class Sort(StrEnum):
    """The order of rows."""

    SHAPE = "shape"
    TIME = "time"
    SHARE = "share"
    GAIN = "gain"
    NOISE = "noise"


@dataclass(frozen=True)
class Filters:
    """Filters of picks. One value of each filter has to fit, and an empty filter lets all through."""

    shapes: Sequence[Mapping[str, int]] = ()
    """Sizes by name; a problem may have more."""
    device: str = ""
    """A part of the GPU's name, in any case."""
    verdicts: Collection[str] = ()

    def has_problem(self, problem: Problem) -> bool:
        """Return True if the problem has the sizes of one of the shapes."""
        return not self.shapes or any(shape.items() <= problem.shape.items() for shape in self.shapes)

    def has_device(self, device: Device) -> bool:
        """Return True if the text is in the device's name, or in its arch where it has no name."""
        return self.device.casefold() in (device.name or device.arch).casefold()

    def fits(self, study: Study) -> bool:
        """Return True if a study passes all filters."""
        fits = self.has_problem(study.problem) and self.has_device(study.device)
        return fits and (not self.verdicts or study.choice.verdict in self.verdicts)

    def check(self, problems: Iterable[Problem], devices: Iterable[Device]) -> None:
        """Raise UsageError, naming what there is, for a word, size or device that none of these has."""
        for verdict in self.verdicts:
            if verdict not in list(Verdict):
                raise unknown("verdict", verdict, list(Verdict))
        known = list(problems)
        for shape in self.shapes:
            check_shape(shape, known)
        names = {device.name or device.arch for device in devices}
        if names and not any(self.device.casefold() in name.casefold() for name in names):
            raise unknown("device", self.device, names)


def check_shape(shape: Mapping[str, int], problems: Collection[Problem]) -> None:
    """Raise UsageError, naming what there is, for sizes that no problem has."""
    if not problems or any(shape.items() <= problem.shape.items() for problem in problems):
        return
    text = ",".join(f"{name}={value}" for name, value in shape.items())
    for name, value in shape.items():
        values = {problem.shape[name] for problem in problems if name in problem.shape}
        if not values:
            raise unknown("size", name, {name for problem in problems for name in problem.shape})
        if value not in values:
            near = sorted(sorted(values, key=lambda known: (abs(known - value), known))[:5])
            raise UsageError(f"no problem has {name}={value}: the nearest are {', '.join(map(str, near))}")
    raise UsageError(f"no problem has {text} together: leave one size out to see what there is")


def ordered(studies: Iterable[Study], sort: Sort = Sort.SHAPE) -> list[Study]:
    """Sort by kernel, arch and device, then as the sizes are read, numerically; or by ``sort`` over all."""
    in_order = sorted(studies, key=_as_read)
    return in_order if sort is Sort.SHAPE else sorted(in_order, key=lambda study: _sort_value(study, sort))


def _sort_value(study: Study, sort: Sort) -> float:
    """Return the sort key: the largest time, gain and noise first, and the least share."""
    if sort is Sort.TIME:
        return -study.choice.time_us
    if sort is Sort.SHARE:
        ceiling = ceiling_of(study)
        return math.inf if ceiling is None else ceiling.share
    if sort is Sort.GAIN:
        return -(study.next_best.ratio if study.next_best else 0.0)
    return -(study.noise if study.noise is not None else -1.0)


def _as_read(study: Study) -> tuple[object, ...]:
    problem, device = study.problem, study.device
    sizes = tuple(problem.shape), tuple(problem.shape.values())
    rest = (problem.routing, problem.input_layout, problem.in_dtype, problem.fp8_dtype, problem.scale_mode)
    return problem.kernel, device.arch, device.name, *sizes, *rest, problem.seed
