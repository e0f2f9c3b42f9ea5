"""Which picks are shown, and in which order: pure functions over winners. Imports nothing that takes time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from fp8tune.choose.verdict import PUBLISHED, WORDS
from fp8tune.errors import UsageError, unknown
from fp8tune.records import Device, Problem

if TYPE_CHECKING:
    from fp8tune.choose.candidates import Winner


class Sort(StrEnum):
    """The order of rows."""

    SHAPE = "shape"
    TIME = "time"
    SHARE = "share"
    GAIN = "gain"
    NOISE = "noise"


_KEYS: Mapping[Sort, Callable[[Winner], float]] = {
    Sort.TIME: lambda winner: -winner.time_us,
    Sort.SHARE: lambda winner: math.inf if winner.ceiling_share is None else winner.ceiling_share,
    Sort.GAIN: lambda winner: -(winner.decision.ratio or 0.0),
    Sort.NOISE: lambda winner: -(winner.noise_floor if winner.noise_floor is not None else -1.0),
}
"""The largest time, gain and noise first; the least share first."""


@dataclass(frozen=True)
class Wanted:
    """Which rows are asked for; of each filter one has to fit, and an empty one lets all through."""

    shapes: Sequence[Mapping[str, int]] = ()
    """Sizes by name; a problem may have more."""
    device: str = ""
    """A part of the GPU's name, in any case."""
    verdicts: Collection[str] = ()

    def has_problem(self, problem: Problem) -> bool:
        """Whether the problem has the sizes of one of the shapes."""
        return not self.shapes or any(shape.items() <= problem.shape.items() for shape in self.shapes)

    def has_device(self, device: Device) -> bool:
        """Whether the text is in the device's name; in its arch, where it has no name."""
        return self.device.casefold() in (device.name or device.arch).casefold()

    def has(self, winner: Winner) -> bool:
        """Whether a pick is asked for."""
        is_wanted = self.has_problem(winner.problem) and self.has_device(winner.device)
        return is_wanted and (not self.verdicts or word(winner) in self.verdicts)

    def check(self, problems: Iterable[Problem], devices: Iterable[Device]) -> None:
        """Raise UsageError, naming what there is, for a word, size or device that none of these has."""
        for verdict in self.verdicts:
            if verdict not in WORDS:
                raise unknown("verdict", verdict, WORDS)
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


def word(winner: Winner) -> str:
    """The verdict of a pick in one word; ``published`` where it has none."""
    return str(winner.verdict or PUBLISHED)


def ordered(winners: Iterable[Winner], sort: Sort = Sort.SHAPE) -> list[Winner]:
    """By kernel, arch and device, then as the sizes are read, numerically; or by ``sort`` over all."""
    found = sorted(winners, key=_as_read)
    return found if sort is Sort.SHAPE else sorted(found, key=_KEYS[sort])


def _as_read(winner: Winner) -> tuple[object, ...]:
    problem, device = winner.problem, winner.device
    rest = (problem.routing, problem.input_layout, problem.in_dtype, problem.fp8_dtype, problem.scale_mode)
    return (
        problem.kernel,
        device.arch,
        device.name,
        tuple(problem.shape),
        tuple(problem.shape.values()),
        *rest,
        problem.seed,
    )
