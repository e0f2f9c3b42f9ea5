"""What ``show`` and ``static-report`` print beside measured rows: published ones, compiled ones, one config for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fp8tune.choose.candidates import Candidates, value_us
from fp8tune.choose.claims import Claim
from fp8tune.choose.conflicts import Conflict
from fp8tune.choose.ranking import Shared, robust, usable
from fp8tune.choose.untimed import TIMED_ON, CompiledKernel, Fitting
from fp8tune.records import Code, Evidence, Kind, Published
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, print_parts, print_report, right
from fp8tune.render.terminal import kernel_name, layout_name, microseconds, print_csv, print_json, slower, times

LISTED = 10
"""Configs of a kernel that was only compiled that are printed; JSON has all."""


def print_single_bests(all_candidates: Sequence[Candidates]) -> None:
    """The one config for all problems of each kernel on each device, with what it loses on each of them."""
    groups: dict[tuple[str, str, str], list[Candidates]] = {}
    for candidates in usable(all_candidates):
        device = candidates.device
        groups.setdefault((candidates.problem.kernel, device.arch, device.name), []).append(candidates)
    for found in groups.values():
        if len(found) > 1 and (best := robust(found)) is not None:
            print_parts(_single_best(found, best), "table")


def _single_best(all_candidates: Sequence[Candidates], best: Shared) -> Iterator[Report[Candidates] | str]:
    other = ", other implementation" if all_candidates[0].kind is Kind.PUBLISHED else ""
    yield f"best single config: {best.config}; worst slowdown {best.worst_slowdown:.3f}{other}"
    columns: list[Column[Candidates]] = [
        left("shape", _shape),
        left("routing", lambda row: row.problem.routing),
        right("us", lambda row: microseconds(row.times_us[best.config])),
        right("best us", lambda row: microseconds(min(row.times_us.values()))),
        right("slowdown", lambda row: f"{row.slowdowns[best.config]:.3f}"),
    ]
    timed = [candidates for candidates in all_candidates if best.config in candidates.times_us]
    yield Report("what it loses on each shape that it was timed on", columns, timed)


def _shape(row: Candidates) -> str:
    shape = f"{row.problem.shape} {layout_name(row.problem.input_layout)}".removesuffix(" contiguous")
    return f"{shape} {row.problem.in_dtype}".removesuffix(" bfloat16")


def print_conflicts(conflicts: Sequence[Conflict], output_format: str) -> None:
    """Every conflict with the best row of each source: a table, or JSON."""

    def of_first(text: Callable[[Conflict], str]) -> Callable[[tuple[Conflict, Evidence]], str]:
        """A conflict is named in its first line alone."""
        return lambda line: text(line[0]) if line[1] is line[0].rows[0] else ""

    columns: list[Column[tuple[Conflict, Evidence]]] = [
        left("kernel", of_first(lambda conflict: kernel_name(conflict.problem.kernel))),
        left("shape", of_first(lambda conflict: str(conflict.problem.shape))),
        right("ratio", of_first(lambda conflict: f"{conflict.ratio:.2f}")),
        right("us", lambda line: microseconds(value_us(line[1]))),
        left("source", lambda line: line[1].source),
        left("config", lambda line: "not stated" if line[1].config is None else str(line[1].config)),
        left("note", lambda line: line[1].note),
    ]
    lines = [(conflict, row) for conflict in conflicts for row in conflict.rows]
    table = Report("published rows that contradict each other; all are kept", columns, lines, names=2)
    print_report(conflicts, contracts.conflict, [table], output_format)


def print_claims(claims: Sequence[Claim], output_format: str) -> None:
    """Every published config with what was measured of it here: a table a kernel and device, or JSON."""
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        device = claim.published.device
        title = f"{claim.published.problem.kernel} on {device.name or 'any device'} ({device.arch})"
        groups.setdefault(title, []).append(claim)
    columns: list[Column[Claim]] = [
        left("shape", lambda row: str(row.published.problem.shape)),
        left("published config", lambda row: str(row.published.config)),
        right("claimed us", lambda row: microseconds(row.claimed_us)),
        right("us here", _measured),
        right("slower", lambda row: slower(row.slowdown)),
        left("pick here", lambda row: str(row.measured.winner.config or "") if row.measured else ""),
        right("pick us", lambda row: microseconds(row.measured.winner.time_us if row.measured else None)),
        left("source", lambda row: row.published.source),
    ]
    tables = [Report(f"published configs of {title}", columns, found) for title, found in groups.items()]
    print_report(claims, contracts.claim, tables, output_format)


def _measured(claim: Claim) -> str:
    """The published config's time here, or why there is none."""
    if claim.measured_us is not None:
        return microseconds(claim.measured_us)
    return "not measured" if claim.status is None else str(claim.status)


def print_published(rows: Sequence[Published], output_format: str) -> None:
    """Whole operations: ``table``, ``markdown``, ``json``, or ``csv`` as ``fp8tune import`` reads it."""
    if output_format == "csv":
        objects = map(contracts.published, rows)
        print_csv([{k: value for k, value in each.items() if k not in ("row", "operation")} for each in objects])
    else:
        print_report(rows, contracts.published, published_tables(rows), output_format)


def published_tables(rows: Sequence[Published]) -> Iterator[Report[Published] | str]:
    """The rows of whole operations, then why some cannot be."""
    columns: list[Column[Published]] = [
        left("shape", lambda row: str(row.shape)),
        left("note", lambda row: row.note),
        left("recipe", lambda row: row.recipe),
        right("bf16 fwd", lambda row: microseconds(row.bf16_fwd_us)),
        right("scaled fwd", lambda row: microseconds(row.scaled_fwd_us)),
        right("bf16 fwd+bwd", lambda row: microseconds(row.bf16_fwd_bwd_us)),
        right("scaled fwd+bwd", lambda row: microseconds(row.scaled_fwd_bwd_us)),
        right("x fwd+bwd", lambda row: times(row.speedup)),
        left("source", lambda row: row.source),
        left("device", lambda row: row.device.name),
        left("as printed", lambda row: "impossible" if row.impossible else ""),
    ]
    if rows:
        yield Report("published by others, us, not measured here", columns, rows, names=2)
    for row in rows:
        if row.impossible:
            yield f"- {row.shape} {row.note}: {row.impossible}, which cannot be"


def print_compiled(rows: Sequence[CompiledKernel], output_format: str) -> None:
    """What was compiled for each arch, and the config that suits it best."""
    columns: list[Column[CompiledKernel]] = [
        left("kernel", lambda row: kernel_name(row.kernel)),
        left("arch", lambda row: row.arch),
        right("compile", lambda row: str(len(row.fitting))),
        right("spill", lambda row: str(row.spilling)),
        right("fail", lambda row: str(row.failed)),
        left("first choice", lambda row: str(row.choice.config) if row.choice else ""),
        right(f"loses on {TIMED_ON}", lambda row: slower(row.choice.slowdown if row.choice else None)),
    ]
    if output_format == "json":
        print_json([contracts.compiled(row) for row in rows])
    elif rows:
        Report("compiled, not run", columns, rows).print()


def print_fitting(rows: Sequence[CompiledKernel], output_format: str) -> None:
    """The configs of each kernel that compile for an arch, in the order of choice, with what the compiler says."""
    pairs = [(row, each) for row in rows for each in row.fitting]
    print_report(pairs, lambda pair: contracts.fitting(*pair), map(_fitting, rows), output_format)


def _fitting(row: CompiledKernel) -> Report[Fitting]:
    def code(each: Fitting) -> Code:
        return each.facts.code or Code()

    def axis(name: str) -> Column[Fitting]:
        return right(name, lambda each: str(each.config.get(name, "")))

    axes = dict.fromkeys(name for each in row.fitting for name in each.config)
    listed = f", {LISTED} of {len(row.fitting)} configs" if len(row.fitting) > LISTED else ""
    columns = [
        *map(axis, axes),
        right(f"loses on {TIMED_ON}", lambda each: slower(each.slowdown)),
        right("registers", lambda each: str(each.facts.registers)),
        right("spilled B", lambda each: str(each.facts.spill_bytes)),
        right("shared B", lambda each: str(each.facts.shared_bytes)),
        right("resident warps", lambda each: str(code(each).resident_warps)),
        left("fp8", lambda each: "native" if code(each).fp8_conversions else "emulated"),
    ]
    title = f"{row.kernel} compiled for {row.arch}, not run{listed}"
    return Report(title, columns, row.fitting[:LISTED], names=len(axes))
