"""How one pick came about, as ``explain`` prints it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fp8tune.ceiling import ceiling_of
from fp8tune.lookups import Lookup
from fp8tune.records import NamedInts, Status
from fp8tune.render import contracts, legend
from fp8tune.render.report import Column, Report, left, print_parts, right
from fp8tune.render.terminal import (
    folded,
    layout_name,
    lookup_key,
    microseconds,
    print_json,
    share,
    slower,
    terminal_width,
)
from fp8tune.stats.explanation import Attempt, Explanation, reasons
from fp8tune.stats.pairs import Pairs
from fp8tune.stats.study import Precedence, Stage
from fp8tune_kernels.runtime.chain import Step

PASSED = {
    Step.KEY: "no row has its key",
    Step.NEAREST: "no row of a near key may be taken",
    Step.FALLBACK: "no row is for any other shape",
}
"""Why a lookup went on."""

LONGEST_REASON = 100
"""Characters of a compiler's words; JSON has all."""


def print_explanation(
    found: Explanation, lookup: Lookup | None, output_format: str, *, top: int, explain: bool
) -> None:
    """Tables and sentences, or one JSON object; ``top`` configs of each table."""
    if output_format == "json":
        print_json(contracts.explanation(found, lookup))
        return
    reports = list(_reports(found, top))
    print_parts([*_head(found), "", *reports], output_format)
    print_parts([*_verdict(found), "", *_lookup(found, lookup)], output_format)
    if explain:
        statuses = {str(status) for status, _ in _untimed(found)}
        print_parts(["", *legend.of(reports, {str(found.study.choice.verdict), *statuses})], output_format)


def _head(found: Explanation) -> Iterator[str]:
    study, ceiling = found.study, ceiling_of(found.study)
    problem, device = study.problem, study.device
    about = [str(problem.shape), problem.routing, layout_name(problem.input_layout), problem.in_dtype]
    said = ", ".join(text for text in about if text not in ("", "none", "contiguous", "bfloat16", "unstated"))
    yield f"{problem.kernel}, {said}, on {device.name or device.arch} ({device.arch})"
    of_ceiling = f", {share(ceiling.share)} of ceiling" if ceiling else ""
    yield f"pick: {study.pick.config or 'not stated'}"
    yield f"{microseconds(study.choice.time_us)} us{of_ceiling}, {study.choice.verdict}"
    if study.today is None or study.today.config == study.pick.config:
        return
    gain = "not timed" if study.speedup is None else f"the pick is {study.speedup:.2f} times as fast"
    yield f"today: {study.today.config} ({study.today.origin}), {gain}"


def _reports(found: Explanation, top: int) -> Iterator[Report[Any]]:
    timed = [one for one in found.attempts if one.time_us is not None]
    for stage, title in (
        (Stage.FINAL, "the finals, in fresh processes"),
        (Stage.COARSE, "the screen, in one process; its times are compared with the screen's time of the pick"),
    ):
        rows = [one for one in timed if one.stage == stage]
        if rows:
            cut = f"; the first {top} of {len(rows)}" if len(rows) > top else ""
            yield Report(f"{title}{cut}", _columns(rows, stage), rows[:top])
    if found.pairs is not None and len(found.pairs.configs) > 1:
        yield _matrix(found.pairs, [one.config for one in timed if one.stage is Stage.FINAL][:top])
    if failures := list(_untimed(found).items()):
        cut = f"; the first {top} of {len(failures)} reasons" if len(failures) > top else ""
        yield Report(f"configs without a time{cut}", UNTIMED, failures[:top])


def _untimed(found: Explanation) -> Counter[tuple[Status, str]]:
    """Count the configs without a time by status and reason."""
    return Counter((one.status, one.reason) for one in found.attempts if one.time_us is None)


UNTIMED: list[Column[tuple[tuple[Status, str], int]]] = [
    right("configs", lambda row: str(row[1])),
    left("status", lambda row: str(row[0][0])),
    left("reason", lambda row: row[0][1][:LONGEST_REASON]),
]


def _columns(rows: Sequence[Attempt], stage: Stage) -> list[Column[Attempt]]:
    axes = dict.fromkeys(name for one in rows for name in one.config or ())
    numbers = {one.config: str(place) for place, one in enumerate(rows, 1)}
    columns: list[Column[Attempt]] = [
        right("#", lambda one: numbers[one.config]),
        *(right(name, _axis(name)) for name in axes),
        right("us", lambda one: microseconds(one.time_us)),
        right("slower", lambda one: slower(one.slowdown)),
    ]
    if stage is Stage.FINAL:
        columns.append(left("interval", _interval))
    return columns


def _axis(name: str) -> Callable[[Attempt], str]:
    return lambda one: "?" if one.config is None else str(one.config.get(name, ""))


def _interval(one: Attempt) -> str:
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
    yield f"why the verdict is {found.study.choice.verdict}"
    width = terminal_width()
    for step in reasons(found):
        yield from folded(step, width, "  ")
    rival, precedence = found.study.next_best, found.study.precedence
    if rival is None or precedence is Precedence.NONE:
        return
    gap = f"{100 * abs(rival.ratio - 1):.1f} % {'faster' if rival.ratio < 1 else 'slower'}"
    end = f" and is not the pick: {legend.WHY_NOT[precedence].meaning}" if rival.ratio < 1 else " by the screen alone"
    yield from folded(f"The next best, {rival.config}, is {gap}{end}.", width, "  ")


def _lookup(found: Explanation, result: Lookup | None) -> Iterator[str]:
    if result is None:
        yield "no lookup asks for this: the rows name no key"
        return
    yield f"what a lookup of {lookup_key(result.key)} launches"
    for number, step in enumerate(result.passed, 1):
        yield f"  {number}. {PASSED[step]}"
    yield from folded(f"{result.why}: {result.config}", terminal_width(), f"  {len(result.passed) + 1}. ")
    if result.config != found.study.pick.config:
        yield "  This is not the pick: fp8tune export writes the pick into a table."
