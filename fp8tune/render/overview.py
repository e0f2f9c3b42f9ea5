"""A line a kernel, as ``show`` prints it that is told nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from fp8tune.render import legend
from fp8tune.render.report import GAP, Column, Report, left, print_parts, right
from fp8tune.render.terminal import folded, kernel_name, share, terminal_width
from fp8tune.stats.study import OPEN, SETTLED, Verdict
from fp8tune.studies import KernelSummary

LONGEST_NAME = 26
"""Characters of a kernel's name, so that a line fits 80 columns."""


def print_overview(found: Sequence[KernelSummary], db: str, output_format: str, *, explain: bool = False) -> None:
    """A table in which each verdict has its number where the terminal is wide enough, else groups of verdicts."""
    title = f"{sum(each.picks for each in found)} picks of {len(found)} kernels in {db}"
    groups: list[Column[KernelSummary]] = [
        right("settled", lambda each: _count(each.count(*SETTLED))),
        right("open", lambda each: _count(each.count(*OPEN))),
        right("quick", lambda each: _count(each.count(Verdict.QUICK))),
    ]
    report = Report(title, _columns(left("verdicts", lambda each: verdict_counts(each.verdicts))), found)
    if output_format == "table" and not _fits(report):
        report = Report(title, _columns(*groups), found)
    in_all: Counter[str] = sum((Counter(each.verdicts) for each in found), Counter())
    says = [*legend.of([report], in_all), ""] if explain else []
    print_parts([report, *folded(verdict_counts(in_all), terminal_width(), "in all: "), *says, HINT], output_format)


HINT = "rows of one kernel: fp8tune show --kernel NAME; what the words mean: --explain"


def _columns(*verdicts: Column[KernelSummary]) -> list[Column[KernelSummary]]:
    return [
        left("kernel", lambda each: kernel_name(each.kernel, LONGEST_NAME)),
        right("picks", lambda each: str(each.picks)),
        right("GPUs", lambda each: str(len(each.devices))),
        right("ceiling", lambda each: share(each.ceiling_share)),
        right("newest", lambda each: age(time.time() - each.newest)),
        *verdicts,
    ]


def _fits(report: Report[KernelSummary]) -> bool:
    width = terminal_width()
    if width is None:
        return False
    lines = [[column.header for column in report.columns], *report.cells()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return sum(widths) + GAP * (len(widths) - 1) <= width


def _count(number: int) -> str:
    return str(number) if number else ""


def verdict_counts(verdicts: Mapping[str, int]) -> str:
    """``40 certified, 2 ambiguous``, the most first."""
    return ", ".join(f"{number} {word}" for word, number in Counter(verdicts).most_common())


def age(seconds: float) -> str:
    """``40 s``, ``13 min``, ``5 h`` or ``12 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
