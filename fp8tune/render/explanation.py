"""How one pick came about, as ``explain`` prints it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fp8tune.choose.explaining import Explanation, Tried
from fp8tune.choose.pairs import Pairs
from fp8tune.choose.wanted import word
from fp8tune.records import NamedInts, Status
from fp8tune.render import contracts, legend
from fp8tune.render.report import Column, Report, left, print_parts, right
from fp8tune.render.terminal import layout_name, lookup_key, microseconds, print_json, share, slower
from fp8tune_kernels.runtime.chain import Step

PASSED = {
    Step.KEY: "no row has its key",
    Step.NEAREST: "no row of a near key may be taken",
    Step.FALLBACK: "no row is for any other shape",
}
"""Why a lookup went on."""

LONGEST_REASON = 100
"""Characters of a compiler's words; JSON has all."""


def print_explanation(found: Explanation, output_format: str, *, top: int, explain: bool) -> None:
    """Tables and sentences, or one JSON object; ``top`` configs of each table."""
    if output_format == "json":
        print_json(contracts.explanation(found))
        return
    reports = list(_reports(found, top))
    print_parts([*_head(found), "", *reports], output_format)
    print_parts(_verdict(found), output_format)
    print_parts(["", *_lookup(found)], output_format)
    if explain:
        statuses = {str(status) for status, _ in found.untimed}
        print_parts(["", *legend.of(reports, {word(found.winner), *statuses})], output_format)


def _head(found: Explanation) -> Iterator[str]:
    winner = found.winner
    problem, device = winner.problem, winner.device
    about = [str(problem.shape), problem.routing, layout_name(problem.input_layout), problem.in_dtype]
    said = ", ".join(text for text in about if text not in ("", "none", "contiguous", "bfloat16", "unstated"))
    yield f"{problem.kernel}, {said}, on {device.name or device.arch} ({device.arch})"
    ceiling = f", {share(winner.ceiling_share)} of ceiling" if winner.ceiling_share is not None else ""
    yield f"pick: {winner.config or 'not stated'}"
    yield f"{microseconds(winner.time_us)} us{ceiling}, {word(winner)}"


def _reports(found: Explanation, top: int) -> Iterator[Report[Any]]:
    timed = [one for one in found.tried if one.time_us is not None]
    for stage, title in (
        ("final", "the finals, in fresh processes"),
        ("screen", "the screen, in one process; its times are compared with the screen's time of the pick"),
    ):
        rows = [one for one in timed if one.stage == stage]
        if rows:
            cut = f"; the first {top} of {len(rows)}" if len(rows) > top else ""
            yield Report(f"{title}{cut}", _columns(rows, stage), rows[:top])
    if found.pairs is not None and len(found.pairs.configs) > 1:
        yield _matrix(found.pairs, [one.config for one in timed if one.stage == "final"][:top])
    if found.untimed:
        reasons = list(found.untimed.items())
        cut = f"; the first {top} of {len(reasons)} reasons" if len(reasons) > top else ""
        yield Report(f"configs without a time{cut}", UNTIMED, reasons[:top])


UNTIMED: list[Column[tuple[tuple[Status, str], int]]] = [
    right("configs", lambda row: str(row[1])),
    left("status", lambda row: str(row[0][0])),
    left("reason", lambda row: row[0][1][:LONGEST_REASON]),
]


def _columns(rows: Sequence[Tried], stage: str) -> list[Column[Tried]]:
    axes = dict.fromkeys(name for one in rows for name in one.config or ())
    numbers = {one.config: str(place) for place, one in enumerate(rows, 1)}
    columns: list[Column[Tried]] = [
        right("#", lambda one: numbers[one.config]),
        *(right(name, _axis(name)) for name in axes),
        right("us", lambda one: microseconds(one.time_us)),
        right("slower", lambda one: slower(one.slowdown)),
    ]
    if stage == "final":
        columns.append(left("interval", _interval))
    return columns


def _axis(name: str) -> Callable[[Tried], str]:
    return lambda one: "?" if one.config is None else str(one.config.get(name, ""))


def _interval(one: Tried) -> str:
    """``-0.4 % to +1.2 %``; the pick has none against itself."""
    return f"{slower(one.interval[0])} to {slower(one.interval[1])}" if one.interval else ""


def _matrix(pairs: Pairs, configs: Sequence[NamedInts | None]) -> Report[int]:
    """How much slower the config of a row is than that of a column, by the numbers of the finals' table."""
    place = {config: number for number, config in enumerate(pairs.configs)}
    rows = [
        (number, place[config]) for number, config in enumerate(configs, 1) if config is not None and config in place
    ]

    def against(rival: int) -> Callable[[int], str]:
        def cell(row: int) -> str:
            here = dict(rows)[row]
            if here == rival:
                return ""
            is_proven = pairs.lower[here, rival] > 0 or pairs.upper[here, rival] < 0
            return slower(math.exp(pairs.mean[here, rival])) + ("*" if is_proven else " ")

        return cell

    columns: list[Column[int]] = [
        right("#", str),
        *(right(f"than {number}", against(rival)) for number, rival in rows),
    ]
    return Report("the finals, pair by pair: how much slower each is; * is proven", columns, [n for n, _ in rows])


def _verdict(found: Explanation) -> Iterator[str]:
    yield f"why the verdict is {word(found.winner)}"
    yield from (f"  {step}" for step in found.steps())
    decision = found.winner.decision
    if decision.kept and decision.ratio is not None:
        faster = f"{100 * (1 - decision.ratio):.1f} % faster"
        yield f"  The next best, {decision.runner_up}, is {faster} and is not the pick:"
        yield f"  {legend.WHY_NOT[decision.kept].meaning}."


def _lookup(found: Explanation) -> Iterator[str]:
    result = found.found
    if result is None:
        yield "no lookup asks for this: the rows name no key"
        return
    yield f"what a lookup of {lookup_key(result.key)} launches"
    for number, step in enumerate(result.passed, 1):
        yield f"  {number}. {PASSED[step]}"
    yield f"  {len(result.passed) + 1}. {result.why}: {result.config}"
    if result.config != found.winner.config:
        yield "  This is not the pick: fp8tune export writes the pick into a table."
