"""Where publications disagree: the best times that two sources print for one problem on one device are far apart.

Nobody decides which is right. All rows are kept, and ranking compares only rows that name their config.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8tune.choose.candidates import value_us
from fp8tune.choose.ranking import grouped
from fp8tune.records import Evidence, Kind, Problem

AGREEMENT = 1.10
"""Two sources agree where the slower best time is at most this much above the faster one."""


@dataclass(frozen=True)
class Conflict:
    """One problem on one device, with each source's best row, the fastest first."""

    rows: tuple[Evidence, ...]

    @property
    def problem(self) -> Problem:
        """What all of them are about."""
        return self.rows[0].problem

    @property
    def ratio(self) -> float:
        """The slowest source's best time over the fastest's."""
        return value_us(self.rows[-1]) / value_us(self.rows[0])


def conflicts(evidence: Iterable[Evidence]) -> list[Conflict]:
    """The conflicts among published rows, the largest first."""
    claims = (entry for entry in evidence if entry.kind is Kind.PUBLISHED and entry.times_us)
    found = []
    for rows in grouped(claims, lambda entry: (entry.problem, entry.device)).values():
        best: dict[str, Evidence] = {}
        for entry in sorted(rows, key=lambda entry: (value_us(entry), entry.source, entry.note)):
            best.setdefault(entry.source, entry)
        found.append(Conflict(tuple(best.values())))
    apart = [conflict for conflict in found if conflict.ratio > AGREEMENT]
    return sorted(apart, key=lambda each: (-each.ratio, each.problem.kernel, each.problem.shape.canonical))
