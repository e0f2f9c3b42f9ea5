"""What ``show`` and ``static-report`` print of evidence that is no measurement of ours, and of one config for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fp8tune.records import Code, Kind
from fp8tune.render.terminal import microseconds, print_json, table, visible
from fp8tune.render.wide import print_wide

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


def print_calibrations(calibrations: Sequence[Calibration], output_format: str) -> None:
    """How the static ranking does where there are measured rows too."""
    from fp8tune.choose.static_score import as_json

    if output_format == "json":
        print_json([as_json(calibration) for calibration in calibrations])
        return
    columns = [("kernel", "left"), ("times on", "left"), ("problems", "right"), ("configs", "right")]
    columns += [("rank correlation", "right")]
    columns += [("first loses", "right"), ("best of 5", "right"), ("default", "right"), ("exported", "left")]
    rows = [
        [
            each.kernel,
            each.device,
            str(each.problems),
            str(each.configs),
            f"{each.rank_correlation:.2f}",
            *(_loss(slowdown) for slowdown in (each.top1_slowdown, each.top5_slowdown, each.default_slowdown)),
            "first" if each.is_trusted else "default",
        ]
        for each in calibrations
    ]
    if rows:
        table(f"static ranking on {calibrations[0].arch} against times", columns, rows)


def print_rankings(rankings: Mapping[str, Sequence[Ranked]], arch: str, output_format: str) -> None:
    """The configs of each kernel that compile for an arch, with the facts that rank them; no times."""
    if output_format == "json":
        print_json([_ranked_json(kernel, arch, each) for kernel, ranked in rankings.items() for each in ranked])
        return
    facts = ("cost", "registers", "spilled B", "shared B", "resident warps", "load B", "store B", "instructions/KiB")
    for kernel, ranked in rankings.items():
        axes = list(dict.fromkeys(name for each in ranked for name in each.config))
        columns = [(name, "right") for name in (*axes, *facts)] + [("fp8", "left")]
        listed = f", {LISTED} of {len(ranked)} configs" if len(ranked) > LISTED else ""
        title = f"{kernel} compiled for {arch}, not run{listed}; costs are no times"
        print_wide(title, columns, [_ranked_cells(each, axes) for each in ranked[:LISTED]], "table", names=len(axes))


def _ranked_cells(each: Ranked, axes: Sequence[str]) -> list[str]:
    facts, code = each.facts, each.facts.code or Code()
    numbers = (facts.registers, facts.spill_bytes, facts.shared_bytes, code.resident_warps, code.load_bytes)
    last = (code.store_bytes, code.instructions_per_kib, "native" if code.fp8_conversions else "emulated")
    config = [str(each.config.get(name, "")) for name in axes]
    return [*config, f"{each.cost:.2f}", *map(str, numbers), *map(str, last)]


def _ranked_json(kernel: str, arch: str, each: Ranked) -> Mapping[str, object]:
    return {"kernel": kernel, "arch": arch, "config": dict(each.config), "cost": each.cost, **asdict(each.facts)}


def _loss(slowdown: float) -> str:
    return f"{100 * (slowdown - 1):+.1f} %"
