"""What ``export`` and ``lint`` print of how far a table can be trusted beyond what was measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, print_report, right
from fp8tune.render.terminal import kernel_name, lookup_key, slower
from fp8tune.stats.shared import Regret, regret

if TYPE_CHECKING:
    from fp8tune.check.lint import LintPlan, VariationResult
    from fp8tune.check.lint import Report as LintReport
    from fp8tune.tables.merge import Merged
    from fp8tune.tables.select import Fallback


def print_robust(rows: Sequence[Fallback], nearest: Collection[str]) -> None:
    """The fallback rows: the worst loss where they were chosen, and what lookups lose on shapes held out, by this row
    and by that of the nearest key. ``nearest`` are the kernels that go by the latter."""

    def of_row(text: Callable[[Regret], str], rule: str) -> Callable[[Fallback], str]:
        return lambda row: text(regret(getattr(item, rule) for item in row.held_out)) if row.held_out else ""

    def mean(regret: Regret) -> str:
        return slower(regret.mean) + (f" ({regret.unknown} not timed)" if regret.unknown else "")

    def worst(regret: Regret) -> str:
        return slower(regret.worst)

    columns: list[Column[Fallback]] = [
        left("kernel", lambda row: kernel_name(row.entry.kernel)),
        left("device", lambda row: row.entry.device or "any"),
        left("for any other shape", lambda row: str(row.entry.config)),
        right("measured on", lambda row: str(len(row.studies))),
        right("worst", lambda row: slower(row.worst)),
        right("held out: mean", of_row(mean, "fallback")),
        right("worst", of_row(worst, "fallback")),
        right("nearest key: mean", of_row(mean, "nearest")),
        right("worst", of_row(worst, "nearest")),
        left("lookups take", lambda row: "the nearest key's row" if row.entry.kernel in nearest else "this row"),
    ]
    if rows:
        Report("slower than the best config of the shape", columns, rows).print()


def export_changes(merged: Merged) -> str:
    """What an export does to the rows of a table."""
    names = ("added", "changed", "unchanged", "removed")
    return "rows " + ", ".join(f"{len(getattr(merged, name))} {name}" for name in names)


def export_losses(merged: Merged) -> list[str]:
    """A line for each row that is removed, and one if some could be."""
    lines = [f"removed: {entry}" for entry in merged.removed]
    if merged.prunable:
        more = f" and {len(merged.prunable) - 1} more" if len(merged.prunable) > 1 else ""
        lines.append(f"stays, but not of the database: {merged.prunable[0]}{more}; --prune removes them")
    return lines


MOST_ALIKE = 5
"""More notices of one kernel are cut."""


def export_notices(notices: Sequence[str], verbose: bool) -> list[str]:
    """What was left out and why. Many lines of one kernel are cut to the first and their number, unless verbose."""
    by_kernel: dict[str, list[str]] = {}
    for line in notices:
        by_kernel.setdefault(line.partition(":")[0], []).append(line)
    for kernel, lines in by_kernel.items():
        if not verbose and len(lines) > MOST_ALIKE:
            lines[1:] = [f"{kernel}: {len(lines) - 1} more lines of this kernel, --verbose prints all"]
    return [line for lines in by_kernel.values() for line in lines]


def print_lint(plan: LintPlan, report: LintReport, output_format: str) -> None:
    """Every variation with what the pick loses on it, as a table or JSON."""
    columns: list[Column[VariationResult]] = [
        left("key", lambda row: lookup_key(row.subject.key)),
        left("varied", lambda row: row.variation.argument),
        left("to", lambda row: str(contracts.varied_to(row))),
        left("the key's pick", lambda row: str(row.pick)),
        right("slower", lambda row: "does not run" if row.slowdown is None else slower(row.slowdown)),
        right("allowed", lambda row: slower(row.allowed)),
        right("fresh processes", lambda row: str(row.processes or "")),
        left("verdict", lambda row: str(row.verdict)),
        left("best there", lambda row: "" if row.pick == row.best else str(row.best)),
    ]
    table = Report(f"{plan.kernel} on {plan.device.name or plan.device.arch}", columns, report.results)
    print_report(report.results, contracts.variation, [table], output_format)
