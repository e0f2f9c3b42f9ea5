"""Page of one size: every config that was tried, the effect of two axes, and the confirmation by process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fp8tune.records import GRAPH, NamedInts, Status
from fp8tune.report.charts import MEANINGS, ORANGE, ROLES, chart, colours, sized, whole_axis
from fp8tune.report.contents import TIMING_BY_EVENTS, Row, day, device_name
from fp8tune.report.parts import Chart, Column, Page, Part, table
from fp8tune.stats.explanation import Attempt, Explanation
from fp8tune.stats.study import Stage

DRAWN = 2000  # configs of one size that are drawn: the fastest

SLOWEST = 4.0  # slowdowns beyond this are drawn as triangles at the edge of a chart


def page(row: Row, title: str) -> Page:
    """Return the page of one row; without its configs if the report has too many sizes."""
    explanation, ratio = row.explanation, row.pick.runner_up_ratio
    text = f"{row.pick.verdict}: {MEANINGS.get(row.pick.verdict, '')}"
    if ratio is not None:
        text += f"; the next best config is {abs(100 * (ratio - 1)):.1f} % {'slower' if ratio >= 1 else 'faster'}"
    if explanation is None:
        text += ". Its configs are not in this report"
    parts = () if explanation is None else tuple(_parts(explanation))
    return Page(row.id, title, f"{text}.", parts, tuple(_facts(row)))


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    """Yield names and values."""
    study, pick = row.study, row.pick
    problem, device, result = study.problem, study.device, study.results[0]
    if row.is_in_use:
        yield "speedup", "in use: today's config is the pick"
    elif pick.speedup_ratio is not None:
        yield "speedup", f"{pick.speedup_ratio:.2f}x over today's config ({pick.today_origin}): {pick.today}"
    if pick.default_ratio is not None:
        yield "over default", f"{pick.default_ratio:.2f}x over {study.default}"
    yield "pick", str(pick.config or "not stated")
    yield "time", f"{pick.time_us:,.4g} us"
    if pick.ceiling_share is not None:
        yield "% of peak", f"{100 * pick.ceiling_share:.1f} %, bound by {pick.bound}"
    yield "verdict", pick.verdict
    yield "outputs", row.check
    if row.disturbance:
        yield "disturbed", row.disturbance
    input_details = (problem.routing, problem.input_layout, problem.in_dtype, problem.fp8_dtype, problem.scale_mode)
    yield "input", ", ".join(filter(None, input_details))
    if study.bytes_moved:
        yield "bytes moved", f"{study.bytes_moved:,}"
    versions = [device.driver and f"driver {device.driver}", device.runtime, device.torch and f"torch {device.torch}"]
    versions += [device.triton and f"Triton {device.triton}"]
    yield "device", ", ".join(filter(None, [device_name(device), device.arch, *versions]))
    if device.timing == TIMING_BY_EVENTS:
        yield "timing", "events: a busy host may have added to times of the coarse pass"
    elif device.timing == GRAPH:
        yield "timing", "launches in CUDA graphs"
    yield "measured", ", ".join(filter(None, [day(study.newest), row.commit and f"commit {row.commit[:12]}"]))
    if result.source:
        yield "source", ", ".join(filter(None, [result.source, result.note]))


def _parts(explanation: Explanation) -> Iterator[Part]:
    yield _configs(explanation)
    yield _confirmation(explanation)
    if len(_axes(explanation)) > 1:
        yield _heat(explanation)
    yield _untimed(explanation)


# Every config


def _configs(explanation: Explanation) -> Part:
    timed = [attempt for attempt in explanation.attempts if attempt.slowdown is not None]
    timed.sort(key=lambda attempt: (attempt.stage is not Stage.FINAL, attempt.slowdown, str(attempt.config)))
    role = _roles(explanation)
    rows = list(enumerate(timed[:DRAWN], 1))
    columns: list[Column[tuple[int, Attempt]]] = [
        Column("rank", "#", lambda row: row[0]),
        Column("role", "role", lambda row: role(row[1])),
        *(_axis_column(axis, lambda row: row[1].config) for axis in _axes(explanation)),
        Column("time", "time us", lambda row: row[1].time_us, 2),
        Column("slowdown", "time over the pick's", lambda row: row[1].slowdown, 3),
        Column("low", "at least", lambda row: row[1].interval[0] if row[1].interval else None, 3),
        Column("high", "at most", lambda row: row[1].interval[1] if row[1].interval else None, 3),
    ]
    note = f"Fastest {DRAWN} of {len(timed)}." if len(timed) > DRAWN else ""
    roles = tuple(sorted({role(attempt) for _, attempt in rows}))
    has_intervals = any(attempt.interval for _, attempt in rows)
    return Part(
        "configs",
        "Every config",
        "Each mark is a config: its time over the pick's. Confirmed configs come first, with the interval of that "
        f"ratio over fresh processes. Triangles at the edge are over {SLOWEST:g} times as slow. Configs in the shaded "
        "tie band count as equally fast.",
        table(columns, rows, note),
        _configs_chart(explanation.plan.tie_band, roles, has_intervals) if rows else None,
    )


def _roles(explanation: Explanation) -> Callable[[Attempt], str]:
    study = explanation.study
    named = {study.default: "default", study.today.config if study.today else None: "today"}
    named[study.pick.config] = "pick"
    return lambda attempt: named.get(attempt.config, "confirmed" if attempt.stage is Stage.FINAL else "coarse pass")


@functools.cache
def _configs_chart(tie_band: float, roles: tuple[str, ...], has_intervals: bool) -> Chart:
    import altair as alt

    scale = alt.Scale(type="log", domainMax=SLOWEST, nice=False, clamp=True)
    band = alt.Chart(alt.InlineData([{"from": 1 - tie_band, "to": 1 + tie_band}]))
    layers = [band.mark_rect(color=ORANGE, opacity=0.15).encode(y=alt.Y("from:Q", scale=scale), y2="to:Q")]
    base = chart().encode(
        x=alt.X(
            "rank:Q", title="configs, the fastest first", scale=alt.Scale(nice=False, zero=False), axis=whole_axis()
        ),
        color=alt.Color("role:N", title=None, scale=colours(ROLES, roles)),
    )
    if has_intervals:  # without any, Vega warns of a scale without an extent
        layers.append(base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", scale=scale), y2="high:Q"))
    marks = base.mark_point(filled=True, size=32, opacity=0.9, tooltip={"content": "data"}).encode(
        y=alt.Y("slowdown:Q", title="time over the pick's", scale=scale),
        shape=alt.when(f"datum.slowdown > {SLOWEST}").then(alt.value("triangle-up")).otherwise(alt.value("circle")),
    )
    return alt.layer(*layers, marks).properties(width="container", height=300)


@functools.lru_cache(1)  # each part of a size asks for them
def _axes(explanation: Explanation) -> list[str]:
    """Return the axes with several values, in the order of their declaration."""
    values: dict[str, set[int]] = {}
    for attempt in explanation.attempts:
        for name, value in (attempt.config or {}).items():
            values.setdefault(name, set()).add(value)
    declared = [name for name, _ in explanation.study.axes]
    order = [name for name in declared if name in values] + [name for name in values if name not in declared]
    return [name for name in order if len(values[name]) > 1]


def _axis_column(axis: str, config_of: Callable[[Any], NamedInts | None]) -> Column[Any]:
    return Column(_field(axis), axis, lambda row: (config_of(row) or NamedInts()).get(axis))


def _field(axis: str) -> str:
    """Return the name of an axis in a chart, where other names stand beside it."""
    return f"axis_{axis}"


def _coarse(explanation: Explanation) -> Iterator[tuple[NamedInts, float]]:
    """Yield each config with its slowdown in the coarse pass, which alone timed all of them."""
    times_us = explanation.study.coarse_us
    pick_us = times_us.get(explanation.study.choice.pick)
    for config, time_us in times_us.items():
        if pick_us:
            yield config, time_us / pick_us


def _heat(explanation: Explanation) -> Part:
    axes = _axes(explanation)
    rows = list(_coarse(explanation))
    columns: list[Column[tuple[NamedInts, float]]] = [
        *(_axis_column(axis, lambda row: row[0]) for axis in axes),
        Column("slowdown", "time over the pick's", lambda row: row[1], 3),
    ]
    return Part(
        "heat",
        "Two axes",
        "Least slowdown of any config with these two values, in the coarse pass. Choose the axes below the chart.",
        table(columns, rows[:DRAWN], f"{DRAWN} of {len(rows)}." if len(rows) > DRAWN else ""),
        _heat_chart(tuple(axes)) if rows else None,
    )


@functools.cache
def _heat_chart(axes: tuple[str, ...]) -> Chart:
    import altair as alt

    options = [_field(axis) for axis in axes]

    def choice(name: str, label: str, value: str) -> Any:
        select = alt.binding_select(options=options, labels=list(axes), name=label)
        return alt.param(name=name, value=value, bind=select)

    base = (
        chart()
        .transform_calculate(x="datum[x_axis]", y="datum[y_axis]")
        .transform_filter("isValid(datum.x) && isValid(datum.y)")
        .transform_aggregate(least="min(slowdown)", groupby=["x", "y"])
        .encode(x=alt.X("x:O", title=None, axis=alt.Axis(labelAngle=0)), y=alt.Y("y:O", title=None))
    )
    scale = alt.Scale(type="log", domain=[1, SLOWEST], clamp=True, range=["#d4e6f4", "#e08a1e"], interpolate="rgb")
    cells = base.mark_rect().encode(color=alt.Color("least:Q", title="time over the pick's", scale=scale))
    return (
        (cells + base.mark_text(color="#000").encode(text=alt.Text("least:Q", format=".2f")))
        .add_params(choice("x_axis", "across ", options[0]), choice("y_axis", "down ", options[1]))
        .properties(width="container", height=240)
    )


def _confirmation(explanation: Explanation) -> Part:
    role = _roles(explanation)
    roles = {attempt.config: role(attempt) for attempt in explanation.attempts}
    confirmed = list(explanation.study.finals)
    varied = [axis for axis in _axes(explanation) if len({config.get(axis) for config in confirmed}) > 1]
    blocks = [
        (_label(result.config, varied), roles[result.config], times.process, number, time_us)
        for result in explanation.study.results
        if result.config is not None
        for times in result.finals
        for number, time_us in times.blocks
    ]
    columns: list[Column[tuple[str, str, str, int, float]]] = [
        Column("config", "config (axes that differ)", lambda block: block[0]),
        Column("role", "role", lambda block: block[1]),
        Column("process", "process", lambda block: block[2]),
        Column("round", "round", lambda block: block[3]),
        Column("time", "time us", lambda block: block[4], 2),
    ]
    return Part(
        "confirmation",
        "Confirmation by process",
        "Each mark is one timed block. Blocks of one process agree better than processes do, so verdicts rest on "
        "processes.",
        table(columns, blocks),
        _confirmation_chart(tuple(sorted({block[1] for block in blocks}))) if blocks else None,
        "Not confirmed: the coarse pass, in one process, chose the pick.",
    )


def _label(config: NamedInts, axes: Sequence[str]) -> str:
    return " ".join(f"{axis}={config[axis]}" for axis in axes if axis in config) or str(config)


@functools.cache
def _confirmation_chart(roles: tuple[str, ...]) -> Chart:
    import altair as alt

    sort = alt.EncodingSortField("time", op="median")
    marks = (
        chart()
        .mark_point(filled=True, size=18, opacity=0.7, tooltip={"content": "data"})
        .encode(
            x=alt.X("time:Q", title="time us", scale=alt.Scale(zero=False)),
            y=alt.Y("config:N", title=None, sort=sort, axis=alt.Axis(labelLimit=460)),
            yOffset="process:N",
            color=alt.Color("role:N", title=None, scale=colours(ROLES, roles)),
        )
    )
    return sized(marks, "config", 34)


# Configs without a time


def _untimed(explanation: Explanation) -> Part:
    untimed = [attempt for attempt in explanation.attempts if attempt.time_us is None]
    examples = {(attempt.status, attempt.reason): str(attempt.config or "") for attempt in reversed(untimed)}
    counts = Counter((attempt.status, attempt.reason) for attempt in untimed)
    rows = [(status, reason, count, examples[status, reason]) for (status, reason), count in counts.most_common()]
    columns: list[Column[tuple[Status, str, int, str]]] = [
        Column("status", "status", lambda row: str(row[0])),
        Column("reason", "reason", lambda row: row[1]),
        Column("configs", "configs", lambda row: row[2]),
        Column("example", "example", lambda row: row[3]),
    ]
    return Part(
        "untimed",
        "Configs without a time",
        "Pruned configs were not tried. The others failed: a wrong output, or an error of the compiler or the launch.",
        table(columns, rows),
        empty="Every config has a time.",
    )
