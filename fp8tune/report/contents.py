"""What a report shows of a database: read once, and cut where it would be too much for one file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from fp8tune.ceiling import Bound, ceiling_of
from fp8tune.records import Device, Kind, Subject
from fp8tune.report.view import Column
from fp8tune.stats.explanation import Explanation
from fp8tune.stats.study import Study
from fp8tune.store.layers import Reader
from fp8tune.studies import read_studies

R = TypeVar("R")

ALL, DETAILED = 1000, 500
"""Up to ALL problems each is shown config by config; of more so many, those with finals first, then the newest."""

LISTED = 5000
"""Rows of a table over problems."""

Progress = Callable[[str, int, int], None]
"""Takes what is done now, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Wanted:
    """Which rows a report shows. Empty: all."""

    kernels: tuple[str, ...] = ()
    arch: str | None = None
    device: str = ""
    """A part of the GPU's name."""


@dataclass(frozen=True, eq=False)
class Row:
    """The pick of one problem on one device."""

    study: Study
    commit: str = ""
    """That last timed it."""
    explanation: Explanation | None = None
    """All configs; None where there are too many problems."""

    @cached_property
    def id(self) -> str:
        """The same in every report of the same problem and device: what links name."""
        problem, device = self.study.problem, self.study.device
        source = self.study.results[0].source if self.study.kind is Kind.PUBLISHED else ""
        text = repr((problem, device.arch, device.name, str(self.study.kind), source))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def kernel(self) -> str:
        """Its name."""
        return self.study.problem.kernel

    @property
    def device(self) -> str:
        """The GPU's name."""
        return device_name(self.study.device)

    @property
    def verdict(self) -> str:
        """The word for what is known of the pick."""
        return str(self.study.choice.verdict)

    @property
    def ceiling_share(self) -> float | None:
        """Share of what memory or the tensor cores give; None where it is not known."""
        ceiling = ceiling_of(self.study)
        return ceiling.share if ceiling else None

    @property
    def bound(self) -> Bound | None:
        """Limit that the share is of."""
        ceiling = ceiling_of(self.study)
        return ceiling.bound if ceiling else None

    @property
    def href(self) -> str:
        """Its permanent link within the file."""
        return f"#problem/{self.id}"


def device_name(device: Device) -> str:
    """A GPU's name; its arch where it has none."""
    return device.name or device.arch


def day(moment: float) -> str:
    """The day of a time in seconds since the epoch, in UTC; empty for 0."""
    return time.strftime("%Y-%m-%d", time.gmtime(moment)) if moment else ""


def named(of: Callable[[R], Row]) -> list[Column[R]]:
    """The columns that say which row of a database a row of a table is about, with its link."""
    return [
        Column("kernel", "kernel", lambda item: of(item).kernel, link="href"),
        Column("href", "link", lambda item: of(item).href, is_hidden=True),
        Column("device", "device", lambda item: of(item).device),
        Column("shape", "shape", lambda item: str(of(item).study.problem.shape)),
        Column("routing", "routing", lambda item: of(item).study.problem.routing),
    ]


def cut(total: int) -> str:
    """What stands below a table that shows the first :data:`LISTED` alone; empty if it shows all."""
    return f"The first {LISTED} of {total} rows: name kernels to see the others." if total > LISTED else ""


@dataclass(frozen=True, eq=False)
class Contents:
    """All that views are made of."""

    label: str
    """What the database is called."""
    rows: Sequence[Row] = ()
    counts: Mapping[tuple[str, Kind], int] = field(default_factory=dict)
    """(arch, kind) -> trials, of the whole database."""
    left_out: str = ""
    """What is not shown config by config, and why."""


def read(reader: Reader, label: str, wanted: Wanted, progress: Progress) -> Contents:
    """Everything that is wanted of a database. Raises DatabaseError for one that cannot be read."""
    studies: list[Study] = []
    kernels: Sequence[str | None] = wanted.kernels or [None]
    for number, kernel in enumerate(kernels):
        progress("reading rows", number, len(kernels))
        studies += read_studies(reader, kernel, wanted.arch)
    found = [one for one in studies if wanted.device.casefold() in one.device.name.casefold()]
    detailed = _detailed(found)
    progress("reading configs", 0, len(detailed))
    rows = [_row(one, reader) if one in detailed else Row(one) for one in found]
    rest = len(found) - len(detailed)
    left_out = (
        f"{rest} of {len(found)} problems are shown without their configs: name kernels to see them." if rest else ""
    )
    return Contents(
        label,
        rows,
        {of: count for of, count in reader.counts().items() if wanted.arch in (None, of[0])},
        left_out,
    )


def _row(study: Study, reader: Reader) -> Row:
    if study.version is None:  # rows of an implementation that is not ours
        return Row(study, "", Explanation(study))
    subject = Subject(study.version, study.device, study.kind, study.problem)
    outcomes = reader.tried(subject) if study.failures else {}
    untimed = {config: outcome for config, outcome in outcomes.items() if config not in study.times_us}
    return Row(study, reader.commit(subject), Explanation(study, untimed))


def _detailed(found: Sequence[Study]) -> Collection[Study]:
    if len(found) <= ALL:
        return set(found)
    by_worth = sorted(found, key=lambda one: (not one.finals, -one.newest))
    return set(by_worth[:DETAILED])
