"""Rows that a report shows, read from a database once and limited to what fits into one file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from fp8tune.records import Device, Kind, Pick, Subject
from fp8tune.report.parts import Column
from fp8tune.stats.explanation import Explanation
from fp8tune.stats.means import group_by
from fp8tune.stats.study import Study, Verdict
from fp8tune.store.layers import Reader
from fp8tune.studies import pick_of, read_studies

R = TypeVar("R")

# Up to ALL sizes, each is shown config by config. Of more, only DETAILED are: confirmed ones first, then the newest.
ALL, DETAILED = 1000, 500

LISTED = 5000  # rows of a table over sizes

# Called with the name of the current step, and the share of it that is done.
Progress = Callable[[str, float], None]

TIMING_BY_EVENTS = "events"


@dataclass(frozen=True, eq=False)
class Row:
    """Pick of one size on one device."""

    study: Study
    commit: str = ""
    """Commit of the sweep that timed it last."""
    explanation: Explanation | None = None
    """All configs; None if the report has too many sizes."""

    @cached_property
    def pick(self) -> Pick:
        """The pick as ``fp8tune show`` lists it."""
        return pick_of(self.study)

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.study.problem.kernel

    @property
    def device(self) -> str:
        """Name of the GPU."""
        return device_name(self.study.device)

    @cached_property
    def id(self) -> str:
        """Identifier in links, equal in every report of the same size and device."""
        problem, device = self.study.problem, self.study.device
        source = self.study.results[0].source if self.study.kind is Kind.PUBLISHED else ""
        text = repr((problem, device.arch, device.name, str(self.study.kind), source))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def is_in_use(self) -> bool:
        """True if today's config is the pick, and others were compared with it."""
        return self.pick.is_in_use

    @property
    def check(self) -> str:
        """By what the outputs are right."""
        return self.pick.checked_by if self.study.kind is Kind.MEASURED else "not checked"

    @cached_property
    def disturbance(self) -> str:
        """Reason to doubt the times; empty without one."""
        study, reasons = self.study, []
        # before launches were gated, compile processes beside the coarse pass could keep the GPU waiting
        if study.device.timing == TIMING_BY_EVENTS and study.choice.verdict is Verdict.QUICK:
            reasons.append("busy host")
        if study.noise is not None and self.explanation and abs(study.noise) > self.explanation.plan.tie_band:
            reasons.append(f"A/A control {100 * study.noise:.1f} % apart")
        return "; ".join(reasons)


def device_name(device: Device) -> str:
    """Return a GPU's name, or its arch if it has none."""
    return device.name or device.arch


def day(moment: float) -> str:
    """Return the day of a time in seconds since the epoch, in UTC; empty for 0."""
    return time.strftime("%Y-%m-%d", time.gmtime(moment)) if moment else ""


def size_columns(row_of: Callable[[R], Row]) -> list[Column[R]]:
    """Return the columns that identify a size, with its permanent link within the file."""
    return [
        Column("kernel", "kernel", lambda item: row_of(item).kernel, link="href"),
        Column("href", "link", lambda item: f"#size/{row_of(item).id}", is_hidden=True),
        Column("shape", "size", lambda item: str(row_of(item).study.problem.shape)),
    ]


def place_columns(row_of: Callable[[R], Row]) -> list[Column[R]]:
    """Return the columns for a size's device and routing."""
    return [
        Column("device", "device", lambda item: row_of(item).device),
        Column("routing", "routing", lambda item: row_of(item).study.problem.routing),
    ]


def limit_note(total: int) -> str:
    """Return the note below a table that shows only the first :data:`LISTED` rows; empty if it shows all."""
    return f"First {LISTED} of {total} rows: use --kernel to see the others." if total > LISTED else ""


@dataclass(frozen=True, eq=False)
class Contents:
    """Everything that pages show. Published rows without a config come last."""

    label: str
    """Name of the database."""
    rows: Sequence[Row] = ()
    note: str = ""
    """Description of sizes that are not shown config by config."""

    @cached_property
    def titles(self) -> Mapping[Row, str]:
        """Title of each row, unique in the report."""
        titles = {row: f"{row.kernel}, {row.study.problem.shape}, {row.device}" for row in self.rows}
        for details in (_routing_details, _measurement_details, lambda row: (row.id,)):
            for rows in group_by(self.rows, titles.__getitem__).values():
                shared = set.intersection(*(set(details(row)) for row in rows))
                if len(rows) > 1:
                    for row in rows:
                        titles[row] = ", ".join([titles[row], *(text for text in details(row) if text not in shared)])
        return titles


def _routing_details(row: Row) -> tuple[str, ...]:
    problem = row.study.problem
    details = (problem.routing, problem.input_layout, problem.in_dtype, problem.fp8_dtype, problem.scale_mode)
    return tuple(filter(None, (*details, f"seed {problem.seed}")))


def _measurement_details(row: Row) -> tuple[str, ...]:
    study = row.study
    return tuple(filter(None, (str(study.kind), study.results[0].source, study.results[0].note, study.device.codegen)))


def read(reader: Reader, label: str, kernels: Sequence[str], device: str, progress: Progress) -> Contents:
    """Read the rows of some kernels, or of all, on devices of that arch or whose name contains the text.

    Raises DatabaseError for a database that cannot be read.
    """
    studies: list[Study] = []
    for number, kernel in enumerate(kernels or [None]):
        progress("reading rows", number / max(len(kernels), 1))
        for study in read_studies(reader, kernel):
            if device == study.device.arch or device.casefold() in study.device.name.casefold():
                studies.append(study)
    studies.sort(key=lambda study: study.kind is Kind.PUBLISHED and not study.pick.config)
    newest = sorted(studies, key=lambda study: (not study.finals, -study.newest))
    detailed = set(studies if len(studies) <= ALL else newest[:DETAILED])
    rows = []
    for number, study in enumerate(studies):
        progress("reading configs", number / len(studies))
        rows.append(_row(study, reader) if study in detailed else Row(study))
    rest = len(studies) - len(detailed)
    note = f"{rest} of {len(studies)} sizes are shown without their configs: use --kernel to see them." if rest else ""
    return Contents(label, rows, note)


def _row(study: Study, reader: Reader) -> Row:
    if study.version is None:  # a published row of another implementation
        return Row(study, "", Explanation(study))
    subject = Subject(study.version, study.device, study.kind, study.problem)
    outcomes = reader.tried(subject) if study.failures else {}
    untimed = {config: outcome for config, outcome in outcomes.items() if config not in study.times_us}
    return Row(study, reader.commit(subject), Explanation(study, untimed))
