"""What ``export`` and ``lint`` print of how far a table can be trusted beyond what was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fp8tune.export.merging import described
from fp8tune.render.terminal import print_json, table

if TYPE_CHECKING:
    from fp8tune.check.lint import LintPlan, Report, VariationResult
    from fp8tune.choose.heldout import Regret
    from fp8tune.export.merging import Merged
    from fp8tune.export.selecting import TableRow


def slower(slowdown: float | None) -> str:
    """``+4.3 %`` for a time 1.043 times another; empty where there is none."""
    return "" if slowdown is None else f"{100 * (slowdown - 1):+.1f} %"


def print_robust(rows: Sequence[TableRow], nearest: Collection[str]) -> None:
    """The configs for shapes without a row: the worst loss where they were chosen, and what lookups lose on shapes held
    out, by this row and by that of the nearest key. ``nearest`` are the kernels that go by the latter."""
    if not rows:
        return
    columns = [("kernel", "left"), ("device", "left"), ("for any other shape", "left"), ("measured on", "right")]
    columns += [("worst", "right"), ("held out: mean", "right"), ("worst", "right")]
    columns += [("nearest key: mean", "right"), ("worst", "right"), ("lookups take", "left")]
    cells = [_robust_cells(row, row.kernel in nearest) for row in rows]
    table("slower than the best config of the shape", columns, cells)


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
"""So many notices of one kernel are printed one by one."""


def export_notices(notices: Sequence[str], verbose: bool) -> list[str]:
    """What was left out and why; of a kernel with many such lines the first and how many there are, unless verbose."""
    by_kernel: dict[str, list[str]] = {}
    for line in notices:
        by_kernel.setdefault(line.partition(":")[0], []).append(line)
    shown: list[str] = []
    for kernel, lines in by_kernel.items():
        if verbose or len(lines) <= MOST_ALIKE:
            shown += lines
        else:
            shown += [lines[0], f"{kernel}: {len(lines) - 1} more lines of this kernel, --verbose prints all"]
    return shown


def _robust_cells(row: TableRow, takes_nearest: bool) -> list[str]:
    cells = [row.kernel, row.device or "any", str(row.config), str(len(row.problems)), slower(row.worst_slowdown)]
    regrets = [row.held_out.robust, row.held_out.nearest] if row.held_out else [None, None]
    return [*cells, *(cell for regret in regrets for cell in _regret_cells(regret)), _taken(takes_nearest)]


def _regret_cells(regret: Regret | None) -> list[str]:
    if regret is None:
        return ["", ""]
    untimed = f" ({regret.untimed} not timed)" if regret.untimed else ""
    return [slower(regret.geomean_slowdown) + untimed, slower(regret.worst_slowdown)]


def _taken(takes_nearest: bool) -> str:
    return "the nearest key's row" if takes_nearest else "this row"


def print_lint(plan: LintPlan, report: Report, output_format: str) -> None:
    """Every variation with what the pick loses on it, as a table or JSON."""
    if output_format == "json":
        print_json([result_json(result) for result in report.results])
        return
    columns = [("key", "left"), ("varied", "left"), ("to", "left"), ("the key's pick", "left"), ("slower", "right")]
    columns += [("allowed", "right"), ("fresh processes", "right"), ("verdict", "left"), ("best there", "left")]
    title = f"{plan.kernel} on {plan.device.name or plan.device.arch}"
    table(title, columns, [_lint_cells(result) for result in report.results])


def result_json(result: VariationResult) -> Mapping[str, object]:
    """One row of ``fp8tune lint --format json``."""
    problem = result.variation.problem
    return {
        "kernel": problem.kernel,
        "key": dict(result.subject.key),
        "argument": result.variation.argument,
        "value": _value(result),
        "shape": dict(problem.shape),
        "routing": problem.routing,
        "input_layout": problem.input_layout,
        "scale_mode": problem.scale_mode,
        "seed": problem.seed,
        "config": dict(result.pick),
        "best_config": dict(result.best),
        "slowdown": result.slowdown,
        "allowed": result.allowed,
        "processes": result.processes,
        "verdict": str(result.verdict),
    }


def _lint_cells(result: VariationResult) -> list[str]:
    return [
        str(result.subject.key),
        result.variation.argument,
        str(_value(result)),
        str(result.pick),
        "does not run" if result.slowdown is None else slower(result.slowdown),
        slower(result.allowed),
        str(result.processes or ""),
        str(result.verdict),
        "" if result.pick == result.best else str(result.best),
    ]


def _value(result: VariationResult) -> int | str:
    """What the varied argument was varied to."""
    name, problem = result.variation.argument, result.variation.problem
    value: int | str = problem.shape[name] if name in problem.shape else getattr(problem, name)
    return value
