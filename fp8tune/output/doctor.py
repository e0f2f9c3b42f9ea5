"""Document and screen of ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from rich.text import Text

from fp8tune.check.findings import Finding, Level
from fp8tune.check.keys import KeyVerdict, VariationResult, varied_to
from fp8tune.output.documents import Document, value
from fp8tune.output.show import size_of
from fp8tune.output.tables import console
from fp8tune.redaction import redacted
from fp8tune.text import visible

STYLES = {Level.ERROR: "red", Level.WARNING: "yellow", Level.OK: "green"}
INDENT = " " * 9


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
    order = [*Level]
    return DoctorReport(
        findings=[
            DoctorFinding.from_records(finding, text=redacted(finding.text), fix=redacted(finding.fix))
            for finding in sorted(findings, key=lambda finding: order.index(finding.level))
        ],
        variations=[_variation(result) for result in results],
    )


def _variation(result: VariationResult) -> KeyVariation:
    subject = result.subject
    size, argument = size_of(subject.size), subject.variation.argument
    return KeyVariation.from_records(subject, result, size=size, argument=argument, varied_to=varied_to(result))


def print_findings(report: DoctorReport) -> None:
    """Print each finding, and its fix below it."""
    out = console()
    for finding in report.findings:
        text = Text(f"{finding.level:<9}", STYLES[finding.level])
        out.print(text.append(_wrapped(finding.text, out.width, len(INDENT)), "default"), soft_wrap=True)
        if finding.fix:
            out.print(Text(f"{INDENT}-> {_wrapped(finding.fix, out.width, len(INDENT) + 3)}"), soft_wrap=True)


def _wrapped(text: str, width: int, indent: int) -> str:
    """Break text between words, below the column where it starts."""
    lines = wrap(visible(text), max(20, width - indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines)
