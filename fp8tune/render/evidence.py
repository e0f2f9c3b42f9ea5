"""What ``show`` and ``static-report`` print of evidence that is no measurement of ours, and of one config for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fp8tune.records import Code, Evidence, Kind
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, print_parts, print_report, right
from fp8tune.render.terminal import microseconds, print_json, slower, visible

if TYPE_CHECKING:
    from fp8tune.choose.conflicts import Conflict
    from fp8tune.choose.ranking import Candidates, Shared
    from fp8tune.choose.static_score import Calibration, Ranked

LISTED = 10
"""Configs of a static ranking that are printed; JSON has all."""


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
    slowdowns = dict(best.slowdowns)
    named = [each for each in all_candidates if best.config in each.times_us and each.problem in slowdowns]
    columns: list[Column[Candidates]] = [
        left("shape", lambda row: str(row.problem.shape) + _transposed(row)),
        left("routing", lambda row: row.problem.routing),
        right("us", lambda row: microseconds(row.times_us[best.config])),
        right("best us", lambda row: microseconds(min(row.times_us.values()))),
        right("slowdown", lambda row: f"{slowdowns[row.problem]:.3f}"),
    ]
    Report("what it loses on each shape that it was timed on", columns, named).print()
    print()


def _transposed(row: Candidates) -> str:
    return "" if row.problem.input_layout == "contiguous" else " transposed"


def print_conflicts(conflicts: Sequence[Conflict], output_format: str) -> None:
    """Every conflict with the best row of each source: a table, or JSON."""
    from fp8tune.choose.ranking import value_us

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


def print_calibrations(calibrations: Sequence[Calibration], output_format: str) -> None:
    """How the static ranking does where there are measured rows too."""
    from fp8tune.choose.static_score import as_json

    if output_format == "json":
        print_json([as_json(calibration) for calibration in calibrations])
        return
    columns: list[Column[Calibration]] = [
        left("kernel", lambda row: row.kernel),
        left("times on", lambda row: row.device),
        right("problems", lambda row: str(row.problems)),
        right("configs", lambda row: str(row.configs)),
        right("rank correlation", lambda row: f"{row.rank_correlation:.2f}"),
        right("first loses", lambda row: slower(row.top1_slowdown)),
        right("best of 5", lambda row: slower(row.top5_slowdown)),
        right("default", lambda row: slower(row.default_slowdown)),
        left("exported", lambda row: "first" if row.is_trusted else "default"),
    ]
    if calibrations:
        Report(f"static ranking on {calibrations[0].arch} against times", columns, calibrations).print()


def print_rankings(rankings: Mapping[str, Sequence[Ranked]], arch: str, output_format: str) -> None:
    """The configs of each kernel that compile for an arch, with the facts that rank them; no times."""
    if output_format == "json":
        print_json([contracts.ranked(kernel, arch, each) for kernel, ranked in rankings.items() for each in ranked])
        return
    for kernel, ranked in rankings.items():
        axes = list(dict.fromkeys(name for each in ranked for name in each.config))
        listed = f", {LISTED} of {len(ranked)} configs" if len(ranked) > LISTED else ""
        title = f"{kernel} compiled for {arch}, not run{listed}; costs are no times"
        columns = [*(right(name, _axis(name)) for name in axes), *_facts()]
        print_parts([Report(title, columns, ranked[:LISTED], names=len(axes))], "table")


def _axis(name: str) -> Callable[[Ranked], str]:
    return lambda each: str(each.config.get(name, ""))


def _facts() -> list[Column[Ranked]]:
    def code(each: Ranked) -> Code:
        return each.facts.code or Code()

    return [
        right("cost", lambda each: f"{each.cost:.2f}"),
        right("registers", lambda each: str(each.facts.registers)),
        right("spilled B", lambda each: str(each.facts.spill_bytes)),
        right("shared B", lambda each: str(each.facts.shared_bytes)),
        right("resident warps", lambda each: str(code(each).resident_warps)),
        right("load B", lambda each: str(code(each).load_bytes)),
        right("store B", lambda each: str(code(each).store_bytes)),
        right("instructions/KiB", lambda each: str(code(each).instructions_per_kib)),
        left("fp8", lambda each: "native" if code(each).fp8_conversions else "emulated"),
    ]
