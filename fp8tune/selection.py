"""Choice of picks by size, device and verdict, the same for ``show`` and the Python API."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fp8tune.errors import UsageError, unknown
from fp8tune.records import RECORDED, Device, Pick, Problem
from fp8tune.stats.study import Verdict
from fp8tune.text import short_dtype

ATTRIBUTES = {
    "routing": "routing",
    "layout": "input_layout",
    "dtype": "in_dtype",
    "output": "fp8_dtype",
    "scale": "scale_mode",
}
"""Names by which people know the fields that distinguish problems beside their sizes."""


@dataclass(frozen=True)
class Selection:
    """Filters of picks. Empty ones let everything through."""

    size: Mapping[str, str] = field(default_factory=dict)
    """Sizes and attributes by name; a problem may have more."""
    device: str = ""
    """Part of a GPU's name in any case, or an arch."""
    verdicts: Collection[str] = ()

    @classmethod
    def parse(cls, size: str | None = None, device: str | None = None, verdicts: Iterable[str] = ()) -> Selection:
        """Parse ``M=16640,layout=transposed``, with commas or blanks.

        Raises:
            UsageError: The size is not of this form, or there is no such verdict.
        """
        parts = [part.partition("=") for part in (size or "").replace(",", " ").split()]
        if bad := next((name for name, _, value in parts if not name or not value), None):
            raise UsageError(f"SIZE {size!r} is not a size ({bad!r}): write it as M=16640,K=5120")
        verdicts = tuple(verdicts)
        for word in verdicts:
            if word not in list(Verdict):
                raise unknown("verdict", word, list(Verdict))
        return cls({name: value for name, _, value in parts}, device or "", verdicts)

    def has_problem(self, problem: Problem) -> bool:
        """Return True if the problem has all sizes and attributes."""
        return all(value in _texts(problem, name) for name, value in self.size.items())

    def has_device(self, device: Device) -> bool:
        """Return True if the text is part of the device's name, or its arch."""
        return self.device.casefold() in device.name.casefold() or self.device == device.arch

    def picks(self, picks: Iterable[Pick]) -> list[Pick]:
        """Return the picks that pass all filters. Raises UsageError, naming what there is, if a filter fits none."""
        picks = list(picks)
        self.check([pick.problem for pick in picks], [pick.device for pick in picks])
        return [
            pick
            for pick in picks
            if self.has_problem(pick.problem)
            and self.has_device(pick.device)
            and (not self.verdicts or pick.verdict in self.verdicts)
        ]

    def check(self, problems: Collection[Problem], devices: Collection[Device]) -> None:
        """Raise UsageError, naming what there is, for a size or device that none of these has."""
        names = {device.name or device.arch for device in devices}
        if devices and not any(map(self.has_device, devices)):
            raise unknown("device", self.device, names)
        if not problems or any(map(self.has_problem, problems)):
            return
        for name, value in self.size.items():
            values = {text for problem in problems for text in _texts(problem, name)[:1]}
            if not values:
                raise unknown("size", name, {name for problem in problems for name in problem.shape})
            if not any(value in _texts(problem, name) for problem in problems):
                raise UsageError(f"no size has {name}={value}: the nearest are {', '.join(_nearest(value, values))}")
        text = " ".join(f"{name}={value}" for name, value in self.size.items())
        raise UsageError(f"no size has {text} together: leave one out to see what there is")


def _texts(problem: Problem, name: str) -> list[str]:
    """Return the spellings of one size or attribute of a problem; none if it has no such name."""
    if name in problem.shape:
        size = problem.shape[name]
        return [str(size), str(int(size))]  # of a recorded launch the first is a word
    if name not in ATTRIBUTES:
        return []
    value = str(getattr(problem, ATTRIBUTES[name]))
    return [value, short_dtype(value), value.removeprefix(RECORDED)[:6]]


def _nearest(value: str, values: Collection[str]) -> list[str]:
    def distance(text: str) -> float:
        is_number = value.isdecimal() and text.isdecimal() and len(value) < 20
        return abs(int(text) - int(value)) if is_number else 0.0

    nearest = sorted(values, key=lambda text: (distance(text), text))[:5]
    return sorted(nearest, key=lambda text: (len(text), text))
