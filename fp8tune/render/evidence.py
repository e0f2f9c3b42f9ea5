"""What ``show`` and ``static-report`` print of evidence that is no measurement of ours, and of one config for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fp8tune.records import Code, Evidence, Kind
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, print_parts, print_report, right
from fp8tune.render.terminal import microseconds, print_json, slower, visible

if TYPE_CHECKING:
    from fp8tune.choose.candidates import Candidates
    from fp8tune.choose.conflicts import Conflict
    from fp8tune.choose.ranking import Shared
    from fp8tune.choose.untimed import CompiledKernel, Fitting

LISTED = 10
"""Configs of a kernel that was only compiled that are printed; JSON has all."""


def print_single_bests(all_candidates: Sequence[Candidates]) -> None:
    """The one config for all problems of each kernel on each device, with what it loses on each of them."""
    from fp8tune.choose.ranking import robust, usable

    groups: dict[tuple[str, str, str], list[Candidates]] = {}
    for candidates in usable(all_candidates):
        device = candidates.device
        groups.setdefault((candidates.problem.kernel, device.arch, device.name), []).append(candidates)
    for found in groups.values():
        if len(found) > 1 and (best := robust(found)) is not None:
            _print_single_best(found, best)


def _print_single_best(all_candidates: Sequence[Candidates], best: Shared) -> None:
    other = ", other implementation" if all_candidates[0].kind is Kind.PUBLISHED else ""
    print(visible(f"best single config: {best.config}; worst slowdown {best.worst_slowdown:.3f}{other}"))
    named = [candidates for candidates in all_candidates if best.config in candidates.times_us]
    columns: list[Column[Candidates]] = [
        left("shape", lambda row: str(row.problem.shape) + _transposed(row)),
        left("routing", lambda row: row.problem.routing),
        right("us", lambda row: microseconds(row.times_us[best.config])),
        right("best us", lambda row: microseconds(min(row.times_us.values()))),
        right("slowdown", lambda row: f"{row.slowdowns[best.config]:.3f}"),
    ]
    Report("what it loses on each shape that it was timed on", columns, named).print()
    print()


def _transposed(row: Candidates) -> str:
    return "" if row.problem.input_layout == "contiguous" else " transposed"


def print_conflicts(conflicts: Sequence[Conflict], output_format: str) -> None:
    """Every conflict with the best row of each source: a table, or JSON."""
    from fp8tune.choose.candidates import value_us

    if output_format == "json":
        print_report(conflicts, contracts.conflict, (), output_format)
        return

    def of_first(text: Callable[[Conflict], str]) -> Callable[[tuple[Conflict, Evidence]], str]:
        """A conflict is named in its first line alone."""
        return lambda line: text(line[0]) if line[1] is line[0].rows[0] else ""

    columns: list[Column[tuple[Conflict, Evidence]]] = [
        left("kernel", of_first(lambda conflict: conflict.problem.kernel)),
        left("shape", of_first(lambda conflict: str(conflict.problem.shape))),
        right("ratio", of_first(lambda conflict: f"{conflict.ratio:.2f}")),
        right("us", lambda line: microseconds(value_us(line[1]))),
        left("source", lambda line: line[1].source),
        left("config", lambda line: "not stated" if line[1].config is None else str(line[1].config)),
        left("note", lambda line: line[1].note),
    ]
    lines = [(conflict, row) for conflict in conflicts for row in conflict.rows]
    print_parts([Report("published rows that contradict each other; all are kept", columns, lines, names=2)], "table")


def print_compiled(rows: Sequence[CompiledKernel], output_format: str) -> None:
    """What was compiled for each arch, and the config that suits it best."""
    from fp8tune.choose.untimed import TIMED_ON

    if output_format == "json":
        print_json([contracts.compiled(row) for row in rows])
        return
    columns: list[Column[CompiledKernel]] = [
        left("kernel", lambda row: row.kernel),
        left("arch", lambda row: row.arch),
        right("compile", lambda row: str(len(row.fitting))),
        right("spill", lambda row: str(row.spilling)),
        right("fail", lambda row: str(row.failed)),
        left("first choice", lambda row: str(row.choice.config) if row.choice else ""),
        right(f"loses on {TIMED_ON}", lambda row: slower(row.choice.slowdown if row.choice else None)),
    ]
    if rows:
        Report("compiled, not run", columns, rows).print()


def print_fitting(rows: Sequence[CompiledKernel], output_format: str) -> None:
    """The configs of each kernel that compile for an arch, in the order of choice, with what the compiler says."""
    if output_format == "json":
        print_json([contracts.fitting(row, each) for row in rows for each in row.fitting])
        return
    for row in rows:
        axes = list(dict.fromkeys(name for each in row.fitting for name in each.config))
        listed = f", {LISTED} of {len(row.fitting)} configs" if len(row.fitting) > LISTED else ""
        title = f"{row.kernel} compiled for {row.arch}, not run{listed}"
        columns = [*(right(name, _axis(name)) for name in axes), *_facts()]
        print_parts([Report(title, columns, row.fitting[:LISTED], names=len(axes))], "table")


def _axis(name: str) -> Callable[[Fitting], str]:
    return lambda each: str(each.config.get(name, ""))


def _facts() -> list[Column[Fitting]]:
    from fp8tune.choose.untimed import TIMED_ON

    def code(each: Fitting) -> Code:
        return each.facts.code or Code()

    return [
        right(f"loses on {TIMED_ON}", lambda each: slower(each.slowdown)),
        right("registers", lambda each: str(each.facts.registers)),
        right("spilled B", lambda each: str(each.facts.spill_bytes)),
        right("shared B", lambda each: str(each.facts.shared_bytes)),
        right("resident warps", lambda each: str(code(each).resident_warps)),
        left("fp8", lambda each: "native" if code(each).fp8_conversions else "emulated"),
    ]
