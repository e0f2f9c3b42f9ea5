"""What ``fp8tune bench --op`` prints: tables of steps, parts and GEMMs with means below, as markdown too, or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fp8tune.bench.grouped import Mean, Row, means
from fp8tune.bench.grouped_contenders import parts_of
from fp8tune.bench.operation import (
    BF16,
    BF16_OF_OURS,
    BF16_OF_TORCH,
    BOTH,
    FORWARD,
    FP8_OF_TORCH,
    GRAPH,
    MICRO_BATCHES,
    TORCHAO,
)
from fp8tune.records import Published
from fp8tune.render import contracts
from fp8tune.render.bench import reasons
from fp8tune.render.evidence import print_published
from fp8tune.render.report import Column, Report, left, print_parts, right
from fp8tune.render.terminal import microseconds, print_json, share, times

GEMMS = {"GEMM out": "forward", "GEMM grad_A": "input gradient", "GEMM grad_B": "weight gradient"}
"""Part -> the pass whose GEMM it is."""


def print_grouped(rows: Sequence[Row], published: Sequence[Published], output_format: str) -> None:
    """Everything that was timed, and what others published: ``table``, ``markdown`` or ``json``."""
    if output_format == "json":
        found = [*map(contracts.grouped_row, rows), *contracts.grouped_means(rows)]
        print_json([*found, *map(contracts.published, published)])
        return
    if rows:
        title = _title(rows[0])
        tables: list[Report[Any]] = [Report(title, list(_steps(rows)), rows, note=_note(rows)), *_parts(title, rows)]
        tables += [_gemm(gemm, title, rows) for gemm in rows[0].operation.other_gemms]
        if any(who in row.operation.variants for row in rows for who, _ in row.steps):
            tables.append(_variants(f"in a CUDA graph, and with codes kept for the backward pass: {title}", rows))
        tables.append(_means(rows))
        print_parts(tables, output_format)
    print_parts((f"- {reason}" for reason in reasons(_missing(rows))), output_format)
    print_published(published, output_format)


def row_line(row: Row) -> str:
    """One problem in a line, with every contender that is wrong."""
    ours = row.steps[row.operation.ours, BOTH]
    said = f"{microseconds(ours.time_us)} us, {times(row.speedup(BOTH))} of bf16" if ours.valid_us else ours.reason
    wrong = [f"{who} {reason}" for who, reason in row.wrong.items() if who != row.operation.ours]
    return f"{' '.join(filter(None, [row.problem.label, str(row.problem.shape)]))}: {', '.join([said, *wrong])}"


def _title(row: Row) -> str:
    """What a table is of. Each says where the recipe is emulated: its times are then not the recipe's."""
    emulated = ", emulated here (codes times scales, a bf16 GEMM)" if row.is_emulated else ""
    where = f"on {row.device.name} ({row.device.arch}), {row.problem.routing} groups, seed {row.problem.seed}"
    return f"{row.operation.what} in {row.operation.recipe}{emulated}, us, {where}"


def _note(rows: Sequence[Row]) -> str:
    """What columns mean."""
    count = {3: "three", 6: "six"}[len(rows[0].operation.gemms)]
    bound = f"bound: bf16 over the {count} GEMMs of the recipe alone"
    if not rows[0].operation.once:
        return bound
    once = f"weights once: quantized for {MICRO_BATCHES} steps, a {_ordinal(MICRO_BATCHES)} of what that takes in each"
    return f"{once}; {bound}, the faster of ours and torch's"


def _ordinal(count: int) -> str:
    return {4: "quarter"}.get(count, f"{count}th")


def _layer(row: Row) -> str:
    """What a row is called: by name and tokens where its shape set has a name for it."""
    M = row.problem.shape["M"]
    return f"{row.problem.label}, {M} rows" if row.problem.label else str(row.problem.shape)


def _names(rows: Sequence[Row]) -> list[Column[Row]]:
    """The column that every table has, and in the first the shape beside a name."""
    return [left("layer" if any(row.problem.label for row in rows) else "shape", _layer)]


def _steps(rows: Sequence[Row]) -> Iterator[Column[Row]]:
    operation = rows[0].operation
    ours = operation.ours
    yield from _names(rows)
    if any(row.problem.label for row in rows):
        yield left("shape", lambda row: str(row.problem.shape))
    if operation.pads:
        yield left("padded", lambda row: "yes" if row.padded else "")
    for who in (BF16, ours):
        yield right(f"{who} {FORWARD}", _valid_time(who, FORWARD))
    yield right(f"x {FORWARD}", lambda row: times(row.speedup(FORWARD)))
    for who in (BF16, ours):
        yield right(f"{who} {BOTH}", _valid_time(who, BOTH))
    yield right(f"x {BOTH}", lambda row: times(row.speedup(BOTH)))
    for who in operation.compared:
        if who not in (ours, TORCHAO):
            yield right(who, _valid_time(who, BOTH))
            yield right("x", _speedup(who))
    yield right("GEMMs alone", lambda row: microseconds(row.gemms_us, "-"))
    yield right("bound", lambda row: times(row.bound))
    yield right("of bound", lambda row: share(row.bound_share))
    if any((TORCHAO, BOTH) in row.steps for row in rows):
        yield right(f"torchao {BOTH}", lambda row: _any_time(row, TORCHAO))
        yield right("x torchao", _over_torchao)
    yield right("peak bf16", lambda row: _gib(row.peak_bytes.get(BF16)))
    for who in (ours, *tuple(operation.once)[:1]):
        yield right(f"peak {who}", _peak(who))
    if any(row.auto for row in rows):
        yield left("auto takes", lambda row: row.auto or "")


def _valid_time(who: str, step: str) -> Callable[[Row], str]:
    return lambda row: microseconds(row.time_us(who, step), "-")


def _speedup(who: str) -> Callable[[Row], str]:
    return lambda row: times(row.speedup(BOTH, who))


def _peak(who: str) -> Callable[[Row], str]:
    return lambda row: _gib(row.peak_bytes.get(who))


def _any_time(row: Row, who: str) -> str:
    """Also of a contender that is wrong, beside that word."""
    return microseconds(row.steps[who, BOTH].time_us if (who, BOTH) in row.steps else None, "-")


def _over_torchao(row: Row) -> str:
    theirs, own = row.time_us(TORCHAO, BOTH), row.ours_us(BOTH)
    return "wrong" if TORCHAO in row.wrong else times(theirs / own if theirs and own else None)


def _parts(title: str, rows: Sequence[Row]) -> Iterator[Report[Row]]:
    """A line a problem, which adds up to our step."""
    names = dict.fromkeys(part for row in rows for part in parts_of(row.problem))
    columns = [
        *_names(rows),
        *(right(part, _part(part)) for part in names),
        right("rest", lambda row: "-" if row.rest_us is None else f"{row.rest_us:,.0f}"),
        right(f"{rows[0].operation.ours} {BOTH}", _valid_time(rows[0].operation.ours, BOTH)),
    ]
    yield Report(f"parts of a step: {title}", columns, rows)


def _part(part: str, whose: str = "") -> Callable[[Row], str]:
    """A part that a row has not is empty, one that was not timed a dash."""
    return lambda row: microseconds(row.part_us(part, whose), "-" if whose or part in row.parts else "")


def _gemm(gemm: str, title: str, rows: Sequence[Row]) -> Report[Row]:
    """A line a problem: the GEMM of one pass, of bfloat16 and of codes, torch's and ours."""
    columns = [
        *_names(rows),
        right(BF16_OF_TORCH, _part(gemm, BF16_OF_TORCH)),
        right(BF16_OF_OURS, _part(gemm, BF16_OF_OURS)),
        right(FP8_OF_TORCH, _part(gemm, FP8_OF_TORCH)),
        right("fp8, ours", _part(gemm)),
        right("x torch's fp8", lambda row: times(row.gemm_speedup(gemm))),
        right("x torch's bf16", lambda row: times(row.gemm_speedup(gemm, BF16_OF_TORCH))),
        right("TFLOP/s", lambda row: _tflops(row, gemm)),
    ]
    return Report(f"{GEMMS[gemm]} GEMM: {title}", columns, rows)


def _tflops(row: Row, gemm: str) -> str:
    M, N, K = (row.problem.shape[dim] for dim in "MNK")
    time_us = row.part_us(gemm)
    return "-" if time_us is None else f"{2 * M * N * K / time_us / 1e6:,.0f}"


def _variants(title: str, rows: Sequence[Row]) -> Report[tuple[Row, str]]:
    """A line for each contender and each variant of ours on each problem: time, without host work, and memory."""
    columns: list[Column[tuple[Row, str]]] = [
        left("shape", lambda line: _layer(line[0])),
        left("contender", lambda line: line[1]),
        right(BOTH, lambda line: microseconds(line[0].time_us(line[1], BOTH), "-")),
        right("x fwd+bwd", lambda line: times(line[0].speedup(BOTH, line[1]))),
        right("of bound", lambda line: share(None if line[1] == BF16 else line[0].bound_share_of(line[1]))),
        right("in a graph", lambda line: microseconds(line[0].time_us(line[1], GRAPH), "-")),
        right("x in a graph", lambda line: times(line[0].speedup(GRAPH, line[1]))),
        right("peak", lambda line: _gib(line[0].peak_bytes.get(line[1]))),
    ]
    lines = [(row, name) for row in rows for name in _in_graphs(row)]
    return Report(title, columns, lines, names=2)


def _in_graphs(row: Row) -> Iterator[str]:
    names = (*row.operation.contenders, *row.operation.variants)
    return (name for name in names if (name, GRAPH) in row.steps)


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def _means(rows: Sequence[Row]) -> Report[tuple[str, Mean]]:
    """A line a ratio: how ours does over all rows, and where worst."""
    columns: list[Column[tuple[str, Mean]]] = [
        left("over all rows", lambda line: _of_pass(line[0])),
        right("geometric mean", lambda line: times(line[1].geomean)),
        right("rows", lambda line: str(line[1].rows)),
        right("at worst", lambda line: times(line[1].worst)),
        left("on", lambda line: _layer(line[1].worst_row)),
    ]
    return Report(f"speedups: {_title(rows[0])}", columns, list(means(rows).items()))


def _of_pass(what: str) -> str:
    """``forward GEMM over fp8, torch's`` for ``GEMM out over fp8, torch's``."""
    part, _, over = what.partition(" over ")
    return f"{GEMMS[part]} GEMM over {over}" if part in GEMMS else what


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
