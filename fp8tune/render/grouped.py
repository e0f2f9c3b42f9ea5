"""What ``fp8tune bench --op`` prints: a table of steps and one of parts, as markdown too, or a JSON list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fp8tune.bench.grouped import Row
from fp8tune.records import Published
from fp8tune.render import contracts
from fp8tune.render.bench import reasons
from fp8tune.render.evidence import print_published
from fp8tune.render.report import Column, Report, left, print_parts, right
from fp8tune.render.terminal import microseconds, print_json, share, times

FORWARD, BOTH, GRAPH = "fwd", "fwd+bwd", "fwd+bwd in a CUDA graph"


def print_grouped(rows: Sequence[Row], published: Sequence[Published], output_format: str) -> None:
    """Everything that was timed, and what others published: ``table``, ``markdown`` or ``json``."""
    if output_format == "json":
        print_json([*map(contracts.grouped_row, rows), *map(contracts.published, published)])
        return
    if rows:
        title = _title(rows[0])
        tables: list[Report[Any]] = [Report(title, list(_steps(rows)), rows), _parts(f"parts of a step: {title}", rows)]
        if any(who in row.operation.variants for row in rows for who, _ in row.steps):
            tables.append(_variants(f"each operand read once for both passes: {title}", rows))
        print_parts(tables, output_format)
    print_parts((f"- {reason}" for reason in reasons(_missing(rows))), output_format)
    print_published(published, output_format)


def row_line(row: Row) -> str:
    """One problem in a line, with every contender that is wrong."""
    ours = row.steps[row.operation.ours, BOTH]
    said = f"{microseconds(ours.time_us)} us, {times(row.speedup(BOTH))} of bf16" if ours.valid_us else ours.reason
    wrong = [f"{who} {reason}" for who, reason in row.wrong.items() if who != row.operation.ours]
    return f"{row.problem.shape}: {', '.join([said, *wrong])}"


def _title(row: Row) -> str:
    """What a table is of. Each says where the recipe is emulated: its times are then not the recipe's."""
    emulated = ", emulated here (codes times scales, a bf16 GEMM)" if row.is_emulated else ""
    where = f"on {row.device.name} ({row.device.arch}), {row.problem.routing} groups, seed {row.problem.seed}"
    return f"grouped GEMM in {row.operation.recipe}{emulated}, us, {where}"


def _steps(rows: Sequence[Row]) -> Iterator[Column[Row]]:
    ours = rows[0].operation.ours
    yield left("shape", lambda row: str(row.problem.shape))
    yield left("padded", lambda row: "yes" if row.padded else "")
    for step in (FORWARD, BOTH):
        yield right(f"bf16 {step}", _valid_time("bf16", step))
        yield right(f"{ours} {step}", _valid_time(ours, step))
    yield right("x fwd", lambda row: times(row.speedup(FORWARD)))
    yield right("x fwd+bwd", lambda row: times(row.speedup(BOTH)))
    yield right("GEMMs alone", lambda row: microseconds(row.gemms_us, "-"))
    yield right("bound", lambda row: times(row.bound))
    yield right("of bound", lambda row: share(row.bound_share))
    yield right("in a graph", lambda row: microseconds(row.ours_us(GRAPH), "-"))
    if any(("torchao", FORWARD) in row.steps for row in rows):
        for step in (FORWARD, BOTH):
            yield right(f"torchao {step}", _time("torchao", step))
        yield right("x torchao", _over_torchao)
    yield right("peak bf16", lambda row: _gib(row.peak_bytes.get("bf16")))
    yield right(f"peak {ours}", lambda row: _gib(row.peak_bytes.get(ours)))


def _valid_time(who: str, step: str) -> Callable[[Row], str]:
    return lambda row: microseconds(row.time_us(who, step), "-")


def _time(who: str, step: str) -> Callable[[Row], str]:
    """Also of a contender that is wrong, beside that word."""
    return lambda row: microseconds(row.steps[who, step].time_us if (who, step) in row.steps else None, "-")


def _over_torchao(row: Row) -> str:
    theirs, own = row.time_us("torchao", BOTH), row.ours_us(BOTH)
    return "wrong" if "torchao" in row.wrong else times(theirs / own if theirs and own else None)


def _parts(title: str, rows: Sequence[Row]) -> Report[str]:
    """A column a problem, which adds up to our step."""
    whole = f"{rows[0].operation.ours} {BOTH}"

    def problem(row: Row) -> Column[str]:
        def cell(part: str) -> str:
            if part == "rest":
                return "-" if row.rest_us is None else f"{row.rest_us:,.0f}"
            if part == whole:
                return microseconds(row.ours_us(BOTH), "-")
            return microseconds(row.parts[part].time_us, "-") if part in row.parts else ""

        return right(str(row.problem.shape), cell)

    names = dict.fromkeys(part for row in rows for part in row.parts)
    return Report(title, [left("part", str), *map(problem, rows)], [*names, "rest", whole])


def _variants(title: str, rows: Sequence[Row]) -> Report[tuple[Row, str]]:
    """A line for ours and for each of its variants on each problem: time beside memory."""
    columns: list[Column[tuple[Row, str]]] = [
        left("shape", lambda line: str(line[0].problem.shape)),
        left("contender", lambda line: line[1]),
        right(BOTH, lambda line: microseconds(line[0].time_us(line[1], BOTH), "-")),
        right("x fwd+bwd", lambda line: times(line[0].speedup(BOTH, line[1]))),
        right("of bound", lambda line: share(line[0].bound_share_of(line[1]))),
        right("in a graph", lambda line: microseconds(line[0].time_us(line[1], GRAPH), "-")),
        right("peak", lambda line: _gib(line[0].peak_bytes.get(line[1]))),
    ]
    lines = [(row, name) for row in rows for name in (row.operation.ours, *row.operation.variants)]
    return Report(title, columns, lines)


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def _missing(rows: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """Why a cell is empty, or its contender wrong."""
    for row in rows:
        where = str(row.problem.shape)
        for who, reason in row.wrong.items():
            yield who, reason, where
        steps = {" ".join(step): timing for step, timing in row.steps.items()}
        for name, timing in (*steps.items(), *row.parts.items()):
            if timing.time_us is None:
                yield name, timing.reason, where
