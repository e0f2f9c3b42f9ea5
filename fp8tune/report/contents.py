"""What a report shows of a database: read once, and cut where it would be too much for one file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from fp8tune.choose import incumbents, ranking
from fp8tune.choose.candidates import Candidates
from fp8tune.choose.explaining import Explanation
from fp8tune.records import Device, Evidence, Kind, Subject
from fp8tune.report.view import Column
from fp8tune.store.layers import Reader
from fp8tune.store.read import NO_HISTORY, History

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

    candidates: Candidates
    commit: str = ""
    """That last timed it."""
    explanation: Explanation | None = None
    """All configs; None where there are too many problems."""

    @cached_property
    def id(self) -> str:
        """The same in every report of the same problem and device: what links name."""
        problem, device = self.candidates.problem, self.candidates.device
        source = self.candidates.entries[0].source if self.candidates.kind is Kind.PUBLISHED else ""
        text = repr((problem, device.arch, device.name, str(self.candidates.kind), source))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def kernel(self) -> str:
        """Its name."""
        return self.candidates.problem.kernel

    @property
    def device(self) -> str:
        """The GPU's name."""
        return device_name(self.candidates.device)

    @property
    def verdict(self) -> str:
        """The word for what is known of the pick."""
        return str(self.candidates.winner.verdict or Kind.PUBLISHED)

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
        Column("shape", "shape", lambda item: str(of(item).candidates.problem.shape)),
        Column("routing", "routing", lambda item: of(item).candidates.problem.routing),
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
    evidence: list[Evidence] = []
    kernels: Sequence[str | None] = wanted.kernels or [None]
    for number, kernel in enumerate(kernels):
        progress("reading rows", number, len(kernels))
        evidence += reader.evidence(kernel, wanted.arch, keep=ranking.competing)
    found = [
        one
        for one in ranking.all_candidates(evidence, incumbents.COMMITTED)
        if wanted.device.casefold() in one.device.name.casefold()
    ]
    detailed = _detailed(found)
    progress("reading configs", 0, len(detailed))
    subjects = {subject: one for one in detailed if (subject := _subject(one)) is not None}
    histories = reader.histories({of: one.times_us.keys() for of, one in subjects.items()})
    rows = [_row(one, histories) if one in detailed else Row(one) for one in found]
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


def _subject(found: Candidates) -> Subject | None:
    """None for rows of an implementation that is not ours."""
    version = found.entries[0].version
    return None if version is None else Subject(version, found.device, found.kind, found.problem)


def _row(found: Candidates, histories: Mapping[Subject, History]) -> Row:
    subject = _subject(found)
    known = NO_HISTORY if subject is None else histories[subject]
    return Row(found, known.commit, Explanation(found, known.outcomes, None))


def _detailed(found: Sequence[Candidates]) -> Collection[Candidates]:
    if len(found) <= ALL:
        return set(found)
    by_worth = sorted(found, key=lambda one: (one.decision is None, -one.winner.newest))
    return set(by_worth[:DETAILED])
