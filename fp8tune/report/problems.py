"""One problem: every config that was tried, what each axis does, and the finals process by process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fp8tune.records import NamedInts, Status
from fp8tune.report.charts import BLUE, ORANGE, ROLES, WIDTH, chart, colours
from fp8tune.report.contents import Row, day, device_name
from fp8tune.report.view import Column, Part, Picture, Value, View, table
from fp8tune.stats.explanation import Attempt, Explanation, reasons
from fp8tune.stats.study import Stage

DRAWN = 2000
"""Configs of one problem that are drawn; of more the fastest."""

SLOWEST = 4.0
"""Slowdowns beyond this lie at the edge of a picture."""


def view(row: Row) -> View:
    """All that is known of one row; without its configs where the report has too many."""
    found = row.study
    title = f"{found.problem.kernel}, {found.problem.shape}, {row.device}"
    said = " ".join(reasons(row.explanation)) if row.explanation is not None else "Its configs are not in this report."
    parts = () if row.explanation is None else tuple(_parts(row.explanation))
    return View(row.id, title, said, parts, tuple(_facts(row)))


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    """Name and value."""
    found, pick = row.study, row.study.pick
    problem, device, entry = found.problem, found.device, found.results[0]
    yield "pick", str(pick.config or "not stated")
    yield "time", f"{found.choice.time_us:,.4g} us"
    if row.ceiling_share is not None:
        yield "of ceiling", f"{100 * row.ceiling_share:.1f} %, bound by {row.bound}"
    yield "verdict", row.verdict
    for name, value in (("default", found.default), ("in the table", found.current)):
        if value:
            yield name, str(value)
    said = (problem.routing, problem.input_layout, problem.in_dtype, problem.fp8_dtype, problem.scale_mode)
    yield "input", ", ".join(filter(None, said))
    if found.bytes_moved:
        yield "bytes moved", f"{found.bytes_moved:,}"
    if found.flops:
        yield "operations", f"{found.flops:,}"
    if found.noise is not None:
        yield "A/A control", f"the default differs from itself by {100 * found.noise:.2f} %"
    software = [device.driver and f"driver {device.driver}", device.runtime, device.torch and f"torch {device.torch}"]
    software += [device.triton and f"Triton {device.triton}"]
    yield "device", ", ".join(filter(None, [device_name(device), device.arch, *software]))
    yield "measured", ", ".join(filter(None, [day(found.newest), row.commit[:12] and f"commit {row.commit[:12]}"]))
    if entry.source:
        yield "source", ", ".join(filter(None, [entry.source, entry.note]))


def _parts(found: Explanation) -> Iterator[Part]:
    yield _configs(found)
    if len(_axes(found)) > 1:
        yield _heat(found)
        yield _alone(found)
    yield _finals(found)
    yield _untimed(found)


# Every config


@dataclass(frozen=True)
class _Config:
    rank: int
    tried: Attempt
    role: str


def _configs(found: Explanation) -> Part:
    timed = [one for one in found.attempts if one.slowdown is not None]
    timed.sort(key=lambda one: (one.stage != "final", one.slowdown, str(one.config)))
    role = _roles(found)
    rows = [_Config(rank, one, role(one)) for rank, one in enumerate(timed[:DRAWN], 1)]
    columns: list[Column[_Config]] = [
        Column("rank", "#", lambda row: row.rank),
        Column("role", "role", lambda row: row.role),
        *(_axis_column(axis, lambda row: row.tried.config) for axis in _axes(found)),
        Column("time", "time, us", lambda row: row.tried.time_us, 2),
        Column("slowdown", "time over the pick's", lambda row: row.tried.slowdown, 3),
        Column("low", "at least", lambda row: row.tried.interval[0] if row.tried.interval else None, 3),
        Column("high", "at most", lambda row: row.tried.interval[1] if row.tried.interval else None, 3),
        Column("stage", "timed in", lambda row: "finals" if row.tried.stage == "final" else "screen"),
    ]
    band = found.plan.tie_band
    cut = f"The fastest {DRAWN} of {len(timed)}." if len(timed) > DRAWN else ""
    return Part(
        "configs",
        "Every config",
        "Each dot is a config: its time over the pick's. Finalists come first, with the interval of that ratio over "
        "fresh processes. The shaded band is the tie band: configs in it count as equally fast.",
        table(columns, rows, cut),
        _configs_chart(band, tuple(sorted({row.role for row in rows})), any(row.tried.interval for row in rows))
        if rows
        else None,
    )


def _roles(found: Explanation) -> Callable[[Attempt], str]:
    """What a config is among the others of a problem."""
    known = {found.study.current: "in the table", found.study.default: "default"}
    known[found.study.pick.config] = "pick"
    return lambda one: known.get(one.config, "finalist" if one.stage == "final" else "other")


@functools.cache
def _configs_chart(band: float, roles: tuple[str, ...], has_intervals: bool) -> Picture:
    import altair as alt

    scale = alt.Scale(type="log", domainMax=SLOWEST, nice=False, clamp=True)
    shade = alt.Chart(alt.InlineData([{"from": 1 - band, "to": 1 + band}])).mark_rect(color=ORANGE, opacity=0.15)
    base = chart().encode(
        x=alt.X("rank:Q", title="configs, the fastest first", scale=alt.Scale(nice=False)),
        color=alt.Color("role:N", title=None, scale=colours(ROLES, roles)),
    )
    dots = base.mark_point(filled=True, size=28, opacity=0.9, tooltip={"content": "data"}).encode(
        y=alt.Y("slowdown:Q", title="time over the pick's", scale=scale)
    )
    layers = [shade.encode(y=alt.Y("from:Q", scale=scale), y2="to:Q")]
    if has_intervals:  # without any Vega warns of a scale without an extent
        layers.append(base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", scale=scale), y2="high:Q"))
    return alt.layer(*layers, dots).properties(width=WIDTH, height=260)


# Axes


@functools.lru_cache(1)  # asked for by each part of a problem
def _axes(found: Explanation) -> list[str]:
    """The axes with more than one value, in the order of their declaration."""
    values: dict[str, set[int]] = {}
    for one in found.attempts:
        for name, value in (one.config or {}).items():
            values.setdefault(name, set()).add(value)
    declared = [name for name, _ in found.study.axes]
    order = [name for name in declared if name in values] + [name for name in values if name not in declared]
    return [name for name in order if len(values[name]) > 1]


def _axis_column(axis: str, config: Any) -> Column[Any]:
    def value(row: Any) -> Value:
        return (config(row) or {}).get(axis)

    return Column(_field(axis), axis, value)


def _field(axis: str) -> str:
    """The name of an axis in a picture, where it stands beside other names."""
    return f"axis_{axis}"


def _screened(found: Explanation) -> list[Attempt]:
    """All configs by their times in the screen, which alone has all."""
    pick = found.study.pick
    of_pick = pick.coarse_us if pick.finals else None
    screen = {result.config: result.coarse_us for result in found.study.results if result.finals}
    rows = []
    for one in found.attempts:
        time_us = screen.get(one.config) if one.stage == "final" else one.time_us
        of = of_pick if of_pick is not None else found.study.choice.time_us
        if time_us is not None and of:
            rows.append(Attempt(one.config, Status.OK, Stage.COARSE, time_us, time_us / of))
    return rows


def _heat(found: Explanation) -> Part:
    axes = _axes(found)
    rows = _screened(found)
    left_out = f"{DRAWN} of {len(rows)}." if len(rows) > DRAWN else ""
    columns: list[Column[Attempt]] = [
        *(_axis_column(axis, lambda row: row.config) for axis in axes),
        Column("slowdown", "time over the pick's", lambda row: row.slowdown, 3),
    ]
    return Part(
        "heat",
        "Two axes",
        "The least slowdown of any config with these two values, in the screen. Choose the axes below the picture.",
        table(columns, rows[:DRAWN], left_out),
        _heat_chart(tuple(axes)) if rows else None,
    )


@functools.cache
def _heat_chart(axes: tuple[str, ...]) -> Picture:
    import altair as alt

    def chosen(name: str, label: str, value: str) -> Any:
        options = [_field(axis) for axis in axes]
        return alt.param(
            name=name, value=value, bind=alt.binding_select(options=options, labels=list(axes), name=label)
        )

    x = chosen("x_axis", "across ", _field(axes[0]))
    y = chosen("y_axis", "down ", _field(axes[1]))
    base = (
        chart()
        .transform_calculate(x="datum[x_axis]", y="datum[y_axis]")
        .transform_filter("isValid(datum.x) && isValid(datum.y)")
        .transform_aggregate(least="min(slowdown)", configs="count()", groupby=["x", "y"])
        .encode(x=alt.X("x:O", title=None, axis=alt.Axis(labelAngle=0)), y=alt.Y("y:O", title=None))
    )
    color = alt.Color(
        "least:Q",
        title="time over the pick's",
        scale=alt.Scale(type="log", domain=[1, SLOWEST], clamp=True, range=["#d4e6f4", "#e08a1e"], interpolate="rgb"),
    )
    return (
        (
            base.mark_rect().encode(color=color)
            + base.mark_text(color="#000").encode(text=alt.Text("least:Q", format=".2f"))
        )
        .add_params(x, y)
        .properties(width=alt.Step(64), height=alt.Step(30))
    )


@dataclass(frozen=True)
class _Step:
    axis: str
    value: int
    least: float
    alone: float | None
    """With this value in the pick, and nothing else changed; None where that was not tried."""


def _alone(found: Explanation) -> Part:
    """What the values of each axis lose."""
    pick = found.study.pick.config or NamedInts()
    least: dict[tuple[str, int], float] = {}
    alone: dict[tuple[str, int], float] = {}
    for one in _screened(found):
        config, slowdown = one.config or NamedInts(), one.slowdown or 1.0
        changed = [axis for axis in config if config[axis] != pick.get(axis)]
        for axis, value in config.items():
            least[axis, value] = min(slowdown, least.get((axis, value), slowdown))
            if not changed or changed == [axis]:
                alone[axis, value] = slowdown
    varied = _axes(found)
    steps = [
        _Step(axis, value, slowdown, alone.get((axis, value)))
        for (axis, value), slowdown in sorted(least.items())
        if axis in varied
    ]
    columns: list[Column[_Step]] = [
        Column("axis", "axis", lambda step: step.axis),
        Column("value", "value", lambda step: step.value),
        Column("least", "best config with it, time over the pick's", lambda step: step.least, 3),
        Column("alone", "the pick with this value alone changed", lambda step: step.alone, 3),
    ]
    return Part(
        "axes",
        "Axis by axis",
        "The line is the best config with each value; the circles are the pick with that value alone changed. A flat "
        "line is an axis that the others make up for. Times of the screen.",
        table(columns, steps),
        _alone_chart() if steps else None,
    )


@functools.cache
def _alone_chart() -> Picture:
    import altair as alt

    base = chart().encode(x=alt.X("value:O", title=None, axis=alt.Axis(labelAngle=0)))
    scale = alt.Scale(type="log")
    line = base.mark_line(point={"color": ORANGE, "filled": True}, color=ORANGE).encode(
        y=alt.Y("least:Q", title="time over the pick's", scale=scale)
    )
    dots = base.mark_point(color=BLUE, size=60).encode(y=alt.Y("alone:Q", scale=scale))
    return (
        (line + dots)
        .properties(width=170, height=120)
        .facet(facet=alt.Facet("axis:N", title=None), columns=3)
        .resolve_scale(x="independent")
    )


# The finals


@dataclass(frozen=True)
class _Block:
    config: str
    """Its axes that are not the same in all finalists."""
    role: str
    process: str
    round: int
    time_us: float


def _finals(found: Explanation) -> Part:
    role = _roles(found)
    roles = {one.config: role(one) for one in found.attempts}
    finalists = list(found.study.finals)
    varied = [axis for axis in _axes(found) if len({config.get(axis) for config in finalists}) > 1]
    named = [(entry, _named(entry.config, varied)) for entry in found.study.results if entry.config is not None]
    blocks = [
        _Block(name, role, times.process, round, time_us)
        for entry, name in named
        for role in [roles.get(entry.config, "other")]
        for times in entry.finals
        for round, time_us in times.blocks
    ]
    columns: list[Column[_Block]] = [
        Column("config", "config, where finalists differ", lambda block: block.config),
        Column("role", "role", lambda block: block.role),
        Column("process", "process", lambda block: block.process),
        Column("round", "round", lambda block: block.round),
        Column("time", "time, us", lambda block: block.time_us, 2),
    ]
    return Part(
        "finals",
        "The finals, process by process",
        "Each dot is one timed block. Blocks of one process agree better than processes do: that is why a verdict "
        "rests on processes.",
        table(columns, blocks),
        _finals_chart(tuple(sorted({block.role for block in blocks}))) if blocks else None,
        "There were no finals: the screen, in one process, chose the pick.",
    )


def _named(config: NamedInts, axes: Sequence[str]) -> str:
    return " ".join(f"{axis}={config[axis]}" for axis in axes if axis in config) or str(config)


@functools.cache
def _finals_chart(roles: tuple[str, ...]) -> Picture:
    import altair as alt

    return (
        chart()
        .mark_point(filled=True, size=18, opacity=0.7, tooltip={"content": "data"})
        .encode(
            x=alt.X("time:Q", title="time, us", scale=alt.Scale(zero=False)),
            y=alt.Y(
                "config:N", title=None, sort=alt.EncodingSortField("time", op="median"), axis=alt.Axis(labelLimit=330)
            ),
            yOffset="process:N",
            color=alt.Color("role:N", title=None, scale=colours(ROLES, roles)),
        )
        .properties(width=380, height=alt.Step(34, **{"for": "position"}))
    )


# What has no time


@dataclass(frozen=True)
class _Reason:
    status: Status
    reason: str
    configs: int
    example: str


def _untimed(found: Explanation) -> Part:
    without = [one for one in found.attempts if one.time_us is None]
    counted = Counter((one.status, one.reason) for one in without)
    example = {(one.status, one.reason): str(one.config or "") for one in reversed(without)}
    rows = [
        _Reason(status, reason, count, example[status, reason]) for (status, reason), count in counted.most_common()
    ]
    columns: list[Column[_Reason]] = [
        Column("status", "status", lambda row: str(row.status)),
        Column("reason", "reason", lambda row: row.reason),
        Column("configs", "configs", lambda row: row.configs),
        Column("example", "one of them", lambda row: row.example),
    ]
    return Part(
        "untimed",
        "Configs without a time",
        "Pruned ones were not tried, for the reason given. The others failed: wrong bytes, or the compiler refused.",
        table(columns, rows),
        empty="Every config has a time.",
    )
