"""Document and screens of ``doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fp8tune.check.configs import Problem, TunedFile
from fp8tune.check.findings import Finding, Level
from fp8tune.check.keys import KeyVerdict, VariationResult
from fp8tune.check.machine import release
from fp8tune.output.documents import Document, Size, value
from fp8tune.output.tables import Column, Screen, number
from fp8tune.redaction import redacted
from fp8tune.stats.means import group_by

INDENT = 9


class DoctorFinding(Document):
    """One thing that was checked."""

    level: Level = value("How bad it is: error, warning or ok.")
    text: str = value("What was found.")
    fix: str = value("What to do about it; empty if there is nothing to do.")


class KeyVariation(Document):
    """One variation of a size in an argument that the lookup key leaves out."""

    size: Size = value("Size that the pick is of.", source="subject.size.shape")
    key: dict[str, int] = value("Its lookup key, which the variation shares.", source="subject.key")
    argument: str = value("Argument that is varied.", source="subject.argument")
    varied_to: int | str = value("Its value there.", source="subject.varied_to")
    pick: dict[str, int] = value("Pick of the size.", source="subject.pick")
    best: dict[str, int] | None = value("Fastest rival there; null if none was timed.")
    slowdown: float | None = value("Time of the pick over that of the rival; null if it was not timed.", "x")
    allowed: float = value("Slowdown that is allowed.", "x", "subject.allowed")
    processes: int = value("Fresh processes that timed both.")
    verdict: KeyVerdict = value("Whether the pick holds there: holds, open or moves.")


class TunedFileProblem(Document):
    """One problem of a tuned file."""

    problem: Problem = value("Kind of problem: no match, damaged, no launch, old Triton and so on.")
    text: str = value("What was found.")
    fix: str = value("What to do about it.")


class TunedFileReport(Document):
    """One tuned file of another program."""

    path: str = value("Path below the folder.")
    consumer: str = value("Program that looks it up: vLLM, SGLang or HF kernels.", source="rule.consumer")
    kernel: str = value("Kernel that its configs are for.", source="rule.kernel")
    device: str = value("Device in its name.")
    arch: str = value("Arch of the device; empty if it is unknown.")
    dtype: str = value("Dtype in its name; empty if there is none.", source="name.dtype")
    triton: str = value("Triton version that it was tuned with; empty if it is not recorded.")
    sizes: list[int] = value("Sizes that have a config.")
    problems: list[TunedFileProblem] = value("Problems; empty if there is none.")


class DoctorReport(Document, printed_by="doctor"):
    """Everything that doctor checked."""

    findings: list[DoctorFinding] = value("Findings, errors first.")
    variations: list[KeyVariation] = value("Variations of the kernel's sizes; empty without KERNEL.")
    files: list[TunedFileReport] = value("Tuned files; empty without --configs.")


def make_report(
    findings: Sequence[Finding], results: Sequence[VariationResult] = (), files: Sequence[TunedFile] = ()
) -> DoctorReport:
    """Return findings as a document."""
    ordered = sorted(findings, key=lambda finding: [*Level].index(finding.level))
    return DoctorReport(
        findings=[
            DoctorFinding(level=item.level, text=redacted(item.text), fix=redacted(item.fix)) for item in ordered
        ],
        variations=list(map(KeyVariation.from_records, results)),
        files=[TunedFileReport.from_records(file, sizes=sorted(file.configs)) for file in files],
    )


def screens(report: DoctorReport) -> Iterator[Screen]:
    """Yield the findings, each with its fix below it, and the number of tuned files with each problem by device."""
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.level:<{INDENT}}{finding.text}")
        lines += [f"{' ' * INDENT}-> {finding.fix}"] if finding.fix else []
    yield Screen(lines)

    def versions(files: Sequence[TunedFileReport]) -> str:
        known = sorted({file.triton for file in files if file.triton}, key=release)
        return " to ".join(known[:1] + known[1:][-1:]) or "-"

    def count(problem: Problem) -> Callable[[tuple[str, Sequence[TunedFileReport]]], str]:
        return lambda row: str(sum(any(item.problem is problem for item in file.problems) for file in row[1]) or "")

    columns = [
        Column("device", lambda row: row[0] or "(none)", loses="end"),
        number("files", lambda row: str(len(row[1]))),
        Column("Triton", lambda row: versions(row[1]), loses="all"),
        *(number(str(problem), count(problem)) for problem in Problem),
    ]
    rows = group_by(report.files, lambda file: file.device).items()
    if rows:
        yield Screen([], columns, [], sorted(rows, key=lambda row: (-len(row[1]), row[0])))
