"""What ``export`` and ``lint`` print of how far a table can be trusted beyond what was measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from fp8tune.export.merging import described
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, print_report, right
from fp8tune.render.terminal import kernel_name, lookup_key, slower
from fp8tune.stats.shared import Regret, regret

if TYPE_CHECKING:
    from fp8tune.check.lint import LintPlan, VariationResult
    from fp8tune.check.lint import Report as LintReport
    from fp8tune.export.merging import Merged
    from fp8tune.export.selecting import TableRow


def print_robust(rows: Sequence[TableRow], nearest: Collection[str]) -> None:
    """The fallback rows: the worst loss where they were chosen, and what lookups lose on shapes held out, by this row
    and by that of the nearest key. ``nearest`` are the kernels that go by the latter."""

    def of_row(text: Callable[[Regret], str], rule: str) -> Callable[[TableRow], str]:
        return lambda row: text(regret(getattr(item, rule) for item in row.held_out)) if row.held_out else ""

    def mean(regret: Regret) -> str:
        return slower(regret.mean) + (f" ({regret.unknown} not timed)" if regret.unknown else "")

    def worst(regret: Regret) -> str:
        return slower(regret.worst)

    columns: list[Column[TableRow]] = [
        left("kernel", lambda row: kernel_name(row.kernel)),
        left("device", lambda row: row.device or "any"),
        left("for any other shape", lambda row: str(row.config)),
        right("measured on", lambda row: str(len(row.problems))),
        right("worst", lambda row: slower(row.worst_slowdown)),
        right("held out: mean", of_row(mean, "fallback")),
        right("worst", of_row(worst, "fallback")),
        right("nearest key: mean", of_row(mean, "nearest")),
        right("worst", of_row(worst, "nearest")),
        left("lookups take", lambda row: "the nearest key's row" if row.kernel in nearest else "this row"),
    ]
    if rows:
        Report("slower than the best config of the shape", columns, rows).print()


def export_changes(merged: Merged) -> str:
    """What an export does to the rows of a table."""
    counts = {"added": merged.added, "changed": merged.changed, "kept": merged.kept, "removed": merged.removed}
    return "rows " + ", ".join(f"{len(rows)} {word}" for word, rows in counts.items())


def export_losses(merged: Merged) -> list[str]:
    """A line for each row that is removed, and one if some could be."""
    lines = [f"removed: {described(row)}" for row in merged.removed]
    if merged.left:
        more = f" and {len(merged.left) - 1} more" if len(merged.left) > 1 else ""
        lines.append(f"kept, but not of the database: {described(merged.left[0])}{more}; --prune removes them")
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
