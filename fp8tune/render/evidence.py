"""What ``show`` and ``static-report`` print of evidence that is no measurement of ours, and of one config for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fp8tune.records import Code, Kind
from fp8tune.render.terminal import microseconds, print_json, table, visible
from fp8tune.render.trust import slower
from fp8tune.render.wide import print_wide

if TYPE_CHECKING:
    from fp8tune.choose.conflicts import Conflict
    from fp8tune.choose.ranking import Candidates, Shared
    from fp8tune.choose.untimed import CompiledKernel, Fitting

LISTED = 10
"""Configs of a kernel that was only compiled that are printed; JSON has all."""


def print_single_bests(all_candidates: Sequence[Candidates]) -> None:
    """The one config for all problems of each kernel on each device, with what it loses on each of them."""
    from fp8tune.choose.ranking import robust, usable

    groups: dict[tuple[str, str, str], list[Candidates]] = {}
    for candidates in usable(all_candidates):
        groups.setdefault((candidates.problem.kernel, candidates.device.arch, candidates.device.name), []).append(
            candidates
        )
    for found in groups.values():
        if len(found) > 1 and (best := robust(found)) is not None:
            _print_single_best(found, best)


def _print_single_best(all_candidates: Sequence[Candidates], best: Shared) -> None:
    named = [candidates for candidates in all_candidates if best.config in candidates.times_us]
    other = ", other implementation" if all_candidates[0].kind is Kind.PUBLISHED else ""
    print(visible(f"best single config: {best.config}; worst slowdown {best.worst_slowdown:.3f}{other}"))
    columns = [("shape", "left"), ("routing", "left"), ("us", "right"), ("best us", "right"), ("slowdown", "right")]
    slowdowns = dict(best.slowdowns)
    rows = [
        [
            f"{candidates.problem.shape}" + ("" if candidates.problem.input_layout == "contiguous" else " transposed"),
            candidates.problem.routing,
            microseconds(candidates.times_us[best.config]),
            microseconds(min(candidates.times_us.values())),
            f"{slowdowns[candidates.problem]:.3f}",
        ]
        for candidates in named
        if candidates.problem in slowdowns
    ]
    table("what it loses on each shape that it was timed on", columns, rows)
    print()


def print_conflicts(conflicts: Sequence[Conflict], output_format: str) -> None:
    """Every conflict with the best row of each source: a table, or JSON."""
    from fp8tune.choose.conflicts import as_json
    from fp8tune.choose.ranking import value_us

    if output_format == "json":
        print_json([as_json(conflict) for conflict in conflicts])
        return
    columns = [("kernel", "left"), ("shape", "left"), ("ratio", "right"), ("us", "right"), ("source", "left")]
    columns += [("config", "left"), ("note", "left")]
    rows = []
    for conflict in conflicts:
        head = [conflict.problem.kernel, str(conflict.problem.shape), f"{conflict.ratio:.2f}"]
        for row in conflict.rows:
            config = "not stated" if row.config is None else str(row.config)
            rows.append([*head, microseconds(value_us(row)), row.source, config, row.note])
            head = ["", "", ""]
    print_wide("published rows that contradict each other; all are kept", columns, rows, "table", names=2)


def print_compiled(rows: Sequence[CompiledKernel], output_format: str) -> None:
    """What was compiled for each arch, and the config that suits it best."""
    if output_format == "json":
        print_json([row.as_json() for row in rows])
        return
    from fp8tune.choose.untimed import TIMED_ON

    columns = [("kernel", "left"), ("arch", "left"), ("compile", "right"), ("spill", "right"), ("fail", "right")]
    columns += [("first choice", "left"), (f"loses on {TIMED_ON}", "right")]
    cells = [
        [row.kernel, row.arch, str(len(row.fitting)), str(row.spilling), str(row.failed), *_choice_cells(row)]
        for row in rows
    ]
    if rows:
        table("compiled, not run", columns, cells)


def _choice_cells(row: CompiledKernel) -> tuple[str, str]:
    return ("", "") if row.choice is None else (str(row.choice.config), slower(row.choice.slowdown))


def print_fitting(rows: Sequence[CompiledKernel], output_format: str) -> None:
    """The configs of each kernel that compile for an arch, in the order of choice, with what the compiler says."""
    if output_format == "json":
        print_json([_fitting_json(row, each) for row in rows for each in row.fitting])
        return
    from fp8tune.choose.untimed import TIMED_ON

    facts = (f"loses on {TIMED_ON}", "registers", "spilled B", "shared B", "resident warps")
    for row in rows:
        axes = list(dict.fromkeys(name for each in row.fitting for name in each.config))
        columns = [(name, "right") for name in (*axes, *facts)] + [("fp8", "left")]
        listed = f", {LISTED} of {len(row.fitting)} configs" if len(row.fitting) > LISTED else ""
        title = f"{row.kernel} compiled for {row.arch}, not run{listed}"
        print_wide(title, columns, [_fitting_cells(f, axes) for f in row.fitting[:LISTED]], "table", names=len(axes))


def _fitting_cells(each: Fitting, axes: Sequence[str]) -> list[str]:
    facts, code = each.facts, each.facts.code or Code()
    config = [str(each.config.get(name, "")) for name in axes]
    numbers = (facts.registers, facts.spill_bytes, facts.shared_bytes, code.resident_warps)
    conversion = "native" if code.fp8_conversions else "emulated"
    return [*config, slower(each.slowdown), *map(str, numbers), conversion]


def _fitting_json(row: CompiledKernel, each: Fitting) -> Mapping[str, object]:
    named = {"kernel": row.kernel, "arch": row.arch, "config": dict(each.config)}
    return {**named, "mean_slowdown": each.slowdown, **asdict(each.facts)}
