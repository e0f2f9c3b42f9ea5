"""What ``fp8tune bench --op grouped-mm`` prints: a table of steps and one of parts, as markdown too, or a JSON list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fp8tune.render.terminal import microseconds, notice, print_json, share, table

if TYPE_CHECKING:
    from fp8tune.bench.grouped import Row
    from fp8tune.bench.published import Published

STEPS = (("bf16", "fwd"), ("fp8", "fwd"), ("bf16", "fwd+bwd"), ("fp8", "fwd+bwd"))
Columns = list[tuple[str, str]]
GRAPH = ("fp8", "fwd+bwd in a CUDA graph")


def print_grouped(rows: Sequence[Row], published: Sequence[Published], output_format: str) -> None:
    """Everything that was timed, and what others published: ``table``, ``markdown`` or ``json``."""
    from fp8tune.bench.grouped import row_json
    from fp8tune.bench.published import as_json

    if output_format == "json":
        print_json([*map(row_json, rows), *map(as_json, published)])
        return
    show = _markdown if output_format == "markdown" else table
    if rows:
        device, seed = rows[0].device, rows[0].problem.seed
        where = f"on {device.name} ({device.arch}), {rows[0].problem.routing} groups, seed {seed}"
        show(f"grouped GEMM, us, {where}", *_steps(rows))
        show(f"parts of the FP8 step, us, {where}", *_parts(rows))
    for reason in _reasons(rows):
        print(reason)
    if published:
        show("published by others, us, not measured here", *_published(published))


def show_row(row: Row, done: int, total: int) -> None:
    """A line of progress on stderr."""
    ours = row.steps["fp8", "fwd+bwd"]
    said = f"{microseconds(ours.time_us)} us, {_times(row.speedup('fwd+bwd'))} of bf16" if ours.time_us else ours.reason
    notice(f"[{done}/{total}] {row.problem.shape}: {said}")


def _steps(rows: Sequence[Row]) -> tuple[Columns, list[list[str]]]:
    with_torchao = any(("torchao", "fwd") in row.steps for row in rows)
    columns: Columns = [("shape", "left"), ("padded", "left")]
    columns += [(f"{who} {step}", "right") for who, step in STEPS]
    columns += [(name, "right") for name in ("x fwd", "x fwd+bwd", "GEMMs alone", "bound", "of bound", "in a graph")]
    if with_torchao:
        columns += [(name, "right") for name in ("torchao fwd", "torchao fwd+bwd", "x torchao")]
    columns += [("peak bf16", "right"), ("peak fp8", "right")]
    return columns, [_step_cells(row, with_torchao) for row in rows]


def _step_cells(row: Row, with_torchao: bool) -> list[str]:
    cells = [str(row.problem.shape), "yes" if row.padded else ""]
    cells += [_time(row.time_us(*step)) for step in STEPS]
    cells += [_times(row.speedup("fwd")), _times(row.speedup("fwd+bwd")), _time(row.gemms_us)]
    cells += [_times(row.bound), share(row.bound_share), _time(row.time_us(*GRAPH))]
    if with_torchao:
        cells += [_time(row.time_us("torchao", step)) for step in ("fwd", "fwd+bwd")]
        theirs, ours = row.time_us("torchao", "fwd+bwd"), row.time_us("fp8", "fwd+bwd")
        cells.append(_times(theirs / ours if theirs and ours else None))
    return [*cells, *(_gib(row.peak_bytes.get(name)) for name in ("bf16", "fp8"))]


def _parts(rows: Sequence[Row]) -> tuple[Columns, list[list[str]]]:
    names = list(dict.fromkeys(part for row in rows for part in row.parts))
    columns: Columns = [("shape", "left"), *((name, "right") for name in names), ("rest", "right")]
    cells = [
        [str(row.problem.shape)]
        + [_time(row.parts[name].time_us) if name in row.parts else "" for name in names]
        + ["-" if row.rest_us is None else f"{row.rest_us:,.0f}"]
        for row in rows
    ]
    return columns, cells


def _published(rows: Sequence[Published]) -> tuple[Columns, list[list[str]]]:
    columns: Columns = [("source", "left"), ("device", "left"), ("recipe", "left"), ("shape", "left")]
    columns += [(name, "right") for name in ("bf16 fwd", "scaled fwd", "bf16 fwd+bwd", "scaled fwd+bwd", "x fwd+bwd")]
    columns += [("note", "left"), ("impossible", "left")]
    return columns, [_published_cells(row) for row in rows]


def _published_cells(row: Published) -> list[str]:
    times = (row.bf16_fwd_us, row.scaled_fwd_us, row.bf16_fwd_bwd_us, row.scaled_fwd_bwd_us)
    named = [row.source, row.device, row.recipe, str(row.shape)]
    return [*named, *map(_time, times), _times(row.speedup), row.note, row.impossible]


def _markdown(title: str, columns: Columns, rows: Iterable[Sequence[str]]) -> None:
    rules = ["---:" if side == "right" else "---" for _, side in columns]
    print(f"{title}\n")
    for line in ([name for name, _ in columns], rules, *rows):
        print(f"| {' | '.join(line)} |")
    print()


def _time(value_us: float | None) -> str:
    return microseconds(value_us) or "-"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why a cell is empty: each reason once, with the first shape it was given for."""
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        steps = {" ".join(step): timing for step, timing in row.steps.items()}
        for name, timing in (*steps.items(), *row.parts.items()):
            if timing.time_us is None:
                first.setdefault((name, timing.reason), str(row.problem.shape))
    return [f"- {name} on {where}: {reason}" for (name, reason), where in first.items()]
