"""Document and screen of ``doctor``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fp8tune.check.findings import Finding, Level
from fp8tune.check.keys import KeyVerdict, VariationResult
from fp8tune.output.documents import Document, value
from fp8tune.output.show import size_of
from fp8tune.output.tables import STYLES, has_styles, styled, width_of, wrapped
from fp8tune.redaction import redacted

INDENT = 9


class DoctorFinding(Document):
    """One thing that was checked."""

    level: Level = value("How bad it is: error, warning or ok.")
    text: str = value("What was found.")
    fix: str = value("What to do about it; empty if there is nothing to do.")


class KeyVariation(Document):
    """One variation of a size in an argument that the lookup key leaves out."""

    size: dict[str, int | str] = value("Size that the pick is of.")
    key: dict[str, int] = value("Its lookup key, which the variation shares.")
    argument: str = value("Argument that is varied.")
    varied_to: int | str = value("Its value there.")
    pick: dict[str, int] = value("Pick of the size.")
    best: dict[str, int] | None = value("Fastest rival there; null if none was timed.")
    slowdown: float | None = value("Time of the pick over that of the rival; null if it was not timed.", "x")
    allowed: float = value("Slowdown that is allowed.", "x")
    processes: int = value("Fresh processes that timed both.")
    verdict: KeyVerdict = value("Whether the pick holds there: holds, open or moves.")


class DoctorReport(Document, printed_by="doctor"):
    """Everything that doctor checked."""

    findings: list[DoctorFinding] = value("Findings, errors first.")
    variations: list[KeyVariation] = value("Variations of the kernel's sizes; empty without KERNEL.")


def make_report(findings: Sequence[Finding], results: Sequence[VariationResult] = ()) -> DoctorReport:
    """Return findings as a document."""
    ordered = sorted(findings, key=lambda finding: [*Level].index(finding.level))
    texts = [DoctorFinding(level=f.level, text=redacted(f.text), fix=redacted(f.fix)) for f in ordered]
    variations = [
        KeyVariation.from_records(result.subject, result, size=size_of(result.subject.size)) for result in results
    ]
    return DoctorReport(findings=texts, variations=variations)


def print_findings(report: DoctorReport) -> None:
    """Print each finding, and its fix below it."""
    width = width_of(sys.stdout)
    for finding in report.findings:
        level = f"{finding.level:<{INDENT}}"
        print((styled(level, STYLES[finding.level]) if has_styles() else level) + wrapped(finding.text, width, INDENT))
        if finding.fix:
            print(f"{' ' * INDENT}-> {wrapped(finding.fix, width, INDENT + 3)}")
