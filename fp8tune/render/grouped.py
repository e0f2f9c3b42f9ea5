"""What ``fp8tune bench --op`` prints: a table of steps and one of parts, as markdown too, or a JSON list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8tune.records import Published
from fp8tune.render.published import print_published
from fp8tune.render.terminal import microseconds, notice, print_json, share, visible
from fp8tune.render.wide import Columns, print_wide

if TYPE_CHECKING:
    from fp8tune.bench.grouped import Row

FORWARD, BOTH, GRAPH = "fwd", "fwd+bwd", "fwd+bwd in a CUDA graph"


def print_grouped(rows: Sequence[Row], published: Sequence[Published], output_format: str) -> None:
    """Everything that was timed, and what others published: ``table``, ``markdown`` or ``json``."""
    from fp8tune.bench.grouped import row_json

    if output_format == "json":
        print_json([*map(row_json, rows), *(row.as_json() for row in published)])
        return
    if rows:
        title = _title(rows[0])
        print_wide(title, *_steps(rows), output_format)
        print_wide(f"parts of a step: {title}", *_parts(rows), output_format)
        if any(who in row.operation.variants for row in rows for who, _ in row.steps):
            print_wide(f"each operand read once for both passes: {title}", *_variants(rows), output_format)
    for reason in _reasons(rows):
        print(visible(reason))
    if published:
        print_published(published, output_format)


def show_row(row: Row, done: int, total: int) -> None:
    """A line of progress on stderr."""
    ours = row.steps[row.operation.ours, BOTH]
    said = f"{microseconds(ours.time_us)} us, {_times(row.speedup(BOTH))} of bf16" if ours.valid_us else ours.reason
    wrong = [f"{who} {reason}" for who, reason in row.wrong.items() if who != row.operation.ours]
    notice(f"[{done}/{total}] {row.problem.shape}: {', '.join([said, *wrong])}")


def _title(row: Row) -> str:
    """What a table is of. Each says where the recipe is emulated: its times are then not the recipe's."""
    emulated = ", emulated here (codes times scales, a bf16 GEMM)" if row.is_emulated else ""
    where = f"on {row.device.name} ({row.device.arch}), {row.problem.routing} groups, seed {row.problem.seed}"
    return f"grouped GEMM in {row.operation.recipe}{emulated}, us, {where}"


def _steps(rows: Sequence[Row]) -> tuple[Columns, list[list[str]]]:
    ours = rows[0].operation.ours
    with_torchao = any(("torchao", FORWARD) in row.steps for row in rows)
    columns: Columns = [("shape", "left"), ("padded", "left")]
    columns += [(f"{who} {step}", "right") for step in (FORWARD, BOTH) for who in ("bf16", ours)]
    columns += [(name, "right") for name in ("x fwd", "x fwd+bwd", "GEMMs alone", "bound", "of bound", "in a graph")]
    if with_torchao:
        columns += [(name, "right") for name in ("torchao fwd", "torchao fwd+bwd", "x torchao")]
    columns += [("peak bf16", "right"), (f"peak {ours}", "right")]
    return columns, [_step_cells(row, with_torchao) for row in rows]


def _step_cells(row: Row, with_torchao: bool) -> list[str]:
    ours = row.operation.ours
    cells = [str(row.problem.shape), "yes" if row.padded else ""]
    cells += [_time(row.time_us(who, step)) for step in (FORWARD, BOTH) for who in ("bf16", ours)]
    cells += [_times(row.speedup(FORWARD)), _times(row.speedup(BOTH)), _time(row.gemms_us)]
    cells += [_times(row.bound), share(row.bound_share), _time(row.ours_us(GRAPH))]
    if with_torchao:
        cells += [_step_time(row, "torchao", step) for step in (FORWARD, BOTH)]
        theirs, own = row.time_us("torchao", BOTH), row.ours_us(BOTH)
        cells.append("wrong" if "torchao" in row.wrong else _times(theirs / own if theirs and own else None))
    return [*cells, *(_gib(row.peak_bytes.get(name)) for name in ("bf16", ours))]


def _step_time(row: Row, who: str, step: str) -> str:
    """Also of a contender that is wrong, beside that word."""
    timing = row.steps.get((who, step))
    return _time(timing.time_us if timing else None)


def _parts(rows: Sequence[Row]) -> tuple[Columns, list[list[str]]]:
    """A column a problem, which adds up to our step."""
    columns: Columns = [("part", "left"), *((str(row.problem.shape), "right") for row in rows)]
    names = dict.fromkeys(part for row in rows for part in row.parts)
    lines = [[name, *(_time(row.parts[name].time_us) if name in row.parts else "" for row in rows)] for name in names]
    rest = ["rest", *("-" if row.rest_us is None else f"{row.rest_us:,.0f}" for row in rows)]
    whole = [f"{rows[0].operation.ours} {BOTH}", *(_time(row.ours_us(BOTH)) for row in rows)]
    return columns, [*lines, rest, whole]


def _variants(rows: Sequence[Row]) -> tuple[Columns, list[list[str]]]:
    """A line for ours and for each of its variants on each problem: time beside memory."""
    columns: Columns = [("shape", "left"), ("contender", "left")]
    columns += [(name, "right") for name in (BOTH, "x fwd+bwd", "of bound", "in a graph", "peak")]
    return columns, [
        [
            str(row.problem.shape),
            name,
            _time(row.time_us(name, BOTH)),
            _times(row.speedup(BOTH, name)),
            share(row.bound_share_of(name)),
            _time(row.time_us(name, GRAPH)),
            _gib(row.peak_bytes.get(name)),
        ]
        for row in rows
        for name in (row.operation.ours, *row.operation.variants)
    ]


def _time(value_us: float | None) -> str:
    return microseconds(value_us) or "-"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why a cell is empty, or its contender wrong: each reason once, with the first shape it was given for."""
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        for who, reason in row.wrong.items():
            first[who, reason] = str(row.problem.shape)
        steps = {" ".join(step): timing for step, timing in row.steps.items()}
        for name, timing in (*steps.items(), *row.parts.items()):
            if timing.time_us is None:
                first.setdefault((name, timing.reason), str(row.problem.shape))
    return [f"- {name} on {where}: {reason}" for (name, reason), where in first.items()]
