"""Tables that ``show`` prints beside picks: published rows, and one config for all problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8tune.records import Kind, Published
from fp8tune.render import contracts
from fp8tune.render.report import Column, Report, left, print_parts, print_report, right
from fp8tune.render.terminal import layout_name, microseconds, print_csv, times
from fp8tune.stats.shared import Loss, choose_shared
from fp8tune.stats.study import Study


def print_single_bests(studies: Sequence[Study]) -> None:
    """The one config for all problems of each kernel on each device, with what it loses on each of them."""
    groups: dict[tuple[str, str, str], list[Study]] = {}
    for study in studies:
        if not study.is_usable:
            continue
        device = study.device
        groups.setdefault((study.problem.kernel, device.arch, device.name), []).append(study)
    for found in groups.values():
        if len(found) > 1 and (best := choose_shared(found)) is not None:
            print_parts(_single_best(found, best), "table")


def _single_best(studies: Sequence[Study], best: Loss) -> Iterator[Report[Study] | str]:
    other = ", other implementation" if studies[0].kind is Kind.PUBLISHED else ""
    yield f"best single config: {best.config}; worst slowdown {best.worst:.3f}{other}"
    columns: list[Column[Study]] = [
        left("shape", _shape),
        left("routing", lambda row: row.problem.routing),
        right("us", lambda row: microseconds(row.times_us[best.config])),
        right("best us", lambda row: microseconds(min(row.times_us.values()))),
        right("slowdown", lambda row: f"{row.slowdowns[best.config]:.3f}"),
    ]
    timed = [study for study in studies if best.config in study.times_us]
    yield Report("what it loses on each shape that it was timed on", columns, timed)


def _shape(row: Study) -> str:
    shape = f"{row.problem.shape} {layout_name(row.problem.input_layout)}".removesuffix(" contiguous")
    return f"{shape} {row.problem.in_dtype}".removesuffix(" bfloat16")


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
