"""Filters of results by size, device and verdict: the same for ``show``, for the report and for the Python API."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fp8tune.errors import UsageError, unknown
from fp8tune.records import Device, NamedInts, Pick, Problem, Subject
from fp8tune.stats.study import Study, Verdict

WORDS = {"routing": "routing", "layout": "input_layout", "dtype": "in_dtype", "scale": "scale_mode"}
"""Names in a size that are not a number -> the attribute of a problem size."""

Size = str | Mapping[str, int | str] | None
"""``"M=16640,K=1408"``, ``{"M": 16640, "layout": "transposed"}``, or None for all."""


@dataclass(frozen=True)
class Filters:
    """Conditions on a result. An empty one holds for all."""

    size: NamedInts = field(default_factory=NamedInts)
    words: Mapping[str, str] = field(default_factory=dict)
    """Attributes of a problem size that have no number, such as ``input_layout``."""
    device: str = ""
    """A part of the GPU's name, in any case, or an arch."""
    verdicts: Collection[str] = ()

    @classmethod
    def parse(
        cls, size: Size = None, device: str | None = None, verdicts: str | Collection[str] | None = None
    ) -> Filters:
        """Read filters as users write them. Raises UsageError."""
        verdicts = (verdicts,) if isinstance(verdicts, str) else tuple(verdicts or ())
        for verdict in verdicts:
            if verdict not in list(Verdict):
                raise unknown("verdict", verdict, list(Verdict))
        items = dict(size) if isinstance(size, Mapping) else _items(size or "")
        numbers, words = {}, {}
        for name, value in items.items():
            if name in WORDS:
                words[WORDS[name]] = str(value)
            elif str(value).isdecimal() and str(value).isascii() and len(str(value)) < 19 and name.isidentifier():
                numbers[name] = int(value)
            else:
                raise UsageError(f"size {f'{name}={value}'!r:.80} is not NAME=NUMBER: write M=16640,K=1408")
        return cls(NamedInts(numbers), words, device or "", verdicts)

    def has_problem(self, problem: Problem) -> bool:
        """Return True if a problem has the size; it may have more dims."""
        return self.size.items() <= problem.shape.items() and all(
            getattr(problem, name) == value for name, value in self.words.items()
        )

    def has_device(self, device: Device) -> bool:
        """Return True if the text is in the device's name or is its arch."""
        return self.device == device.arch or self.device.casefold() in device.name.casefold()

    def has(self, record: Pick | Subject | Study) -> bool:
        """Return True if the problem and the device of a record pass."""
        return self.has_problem(record.problem) and self.has_device(record.device)

    def check(self, problems: Iterable[Problem], devices: Iterable[Device]) -> None:
        """Raise UsageError, naming what there is, for a size, word or device that none of these has."""
        known, devices = list(problems), list(devices)
        for attribute, value in self.words.items():
            if known and value not in (values := {getattr(problem, attribute) for problem in known}):
                raise unknown(next(word for word in WORDS if WORDS[word] == attribute), value, values)
        for name, number in self.size.items():
            numbers = {problem.shape[name] for problem in known if name in problem.shape}
            if known and not numbers:
                raise unknown("size", name, {name for problem in known for name in problem.shape})
            if known and number not in numbers:
                near = sorted(sorted(numbers, key=lambda value: (abs(value - number), value))[:5])
                raise UsageError(f"no result has {name}={number}: the nearest are {', '.join(map(str, near))}")
        if known and not any(map(self.has_problem, known)):
            raise UsageError("no result has all of these sizes together: leave one out to see what there is")
        if devices and not any(map(self.has_device, devices)):
            raise unknown("device", self.device, {device.name or device.arch for device in devices})


def _items(text: str) -> dict[str, str]:
    items = [item.partition("=") for item in text.replace(",", " ").split()]
    for name, equals, value in items:
        if not (name and equals and value):
            raise UsageError(f"size {text!r:.80} is not NAME=NUMBER: write M=16640,K=1408")
    return {name: value for name, _, value in items}
