"""Configs that others published for a problem, beside what was measured of them and the pick."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from fp8tune.choose.candidates import Candidates, value_us
from fp8tune.choose.incumbents import NO_INCUMBENTS, Incumbents
from fp8tune.choose.ranking import all_candidates
from fp8tune.records import Evidence, Kind, NamedInts, Status


@dataclass(frozen=True)
class Claim:
    """One published config."""

    published: Evidence
    status: Status | None
    """How the same config ended here, on the same problem and device; None where it was not tried."""
    measured: Candidates | None
    """What was timed here of the problem on the device; None where nothing was."""

    @property
    def claimed_us(self) -> float | None:
        """As the source says, if it does."""
        return value_us(self.published) if self.published.times_us else None

    @property
    def measured_us(self) -> float | None:
        """Of the same config here; None where it was not timed."""
        return self.measured.times_us.get(self._config) if self.measured else None

    @property
    def slowdown(self) -> float | None:
        """The same config's time here over the best, both of the finals or of the screen."""
        return self.measured.slowdowns.get(self._config) if self.measured else None

    @property
    def _config(self) -> NamedInts:
        return self.published.config or NamedInts()


def claims(evidence: Iterable[Evidence], incumbents: Incumbents = NO_INCUMBENTS) -> list[Claim]:
    """Every published row that names a config, by kernel, device and problem; the names decide the order."""
    rows = list(evidence)
    ours = [row for row in rows if row.kind is not Kind.PUBLISHED]
    measured = {_question(each.entries[0]): each for each in all_candidates(ours, incumbents)}
    statuses = {(_question(row), row.config): row.status for row in ours if row.kind is Kind.MEASURED}
    published = [row for row in rows if row.kind is Kind.PUBLISHED and row.config is not None]
    return [
        Claim(row, statuses.get((_question(row), row.config)), measured.get(_question(row)))
        for row in sorted(published, key=_order)
    ]


def _question(row: Evidence) -> Hashable:
    return row.problem, row.device.arch, row.device.name


def _order(row: Evidence) -> tuple[str, ...]:
    config = row.config.canonical if row.config else ""
    problem = row.problem.kernel, row.device.arch, row.device.name, row.problem.shape.canonical
    return *problem, row.problem.input_layout, row.source, config, row.note
