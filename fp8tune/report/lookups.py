"""Losses of the lookup rules: on sizes that nobody measured, and with the picks of other devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8tune.records import Kind
from fp8tune.report.charts import BLUE, GREEN, GREY, ORANGE, PINK, chart, sized
from fp8tune.report.contents import LISTED, Contents, Row, limit_note, place_columns, size_columns
from fp8tune.report.parts import Chart, Column, Page, Part, table
from fp8tune.stats.means import group_by
from fp8tune.stats.shared import hold_out
from fp8tune.tables.select import nearest_of
from fp8tune_kernels import tables

RULES = {"pick": GREEN, "nearest": BLUE, "fallback": ORANGE, "other device": PINK, "default": GREY}

HELD_OUT = 200  # sizes of one kernel and device that are left out in turn: time grows with their square


@dataclass(frozen=True)
class Loss:
    """Slowdown of one rule's config on one size."""

    row: Row
    rule: str
    slowdown: float | None
    """Time over the best config's; None if the rule's config has no time there."""

    @property
    def percent(self) -> float | None:
        """The slowdown in percent."""
        return None if self.slowdown is None else 100 * (self.slowdown - 1)


def losses(rows: Sequence[Row]) -> Iterator[Loss]:
    """Yield the loss of every rule on each size, with the size itself left out for *nearest* and *fallback*."""
    timed = [row for row in rows if row.study.kind is not Kind.PUBLISHED and row.study.pick.config is not None]
    for same_place in group_by(timed, lambda row: (row.kernel, row.study.device.name, row.study.kind)).values():
        yield from _losses_of_place(same_place[:HELD_OUT])
    for same_size in group_by(timed, lambda row: (row.study.problem, row.study.kind)).values():
        for row in same_size:
            picks = {rival.study.pick.config for rival in same_size if rival.device != row.device}
            yield from (Loss(row, "other device", row.study.slowdowns.get(pick)) for pick in picks if pick is not None)


def _losses_of_place(rows: Sequence[Row]) -> Iterator[Loss]:
    studies = [row.study for row in rows]
    by_key: dict[tuple[object, ...], tables.Row] = {}
    for study in studies:
        if study.is_usable and study.lookup_key is not None and study.pick.config is not None:
            key = tuple(sorted(study.lookup_key.items()))
            by_key.setdefault(key, (study.problem.kernel, "", key, tuple(study.pick.config.items())))
    held_out = {item.study.problem: item for item in hold_out(studies, (), nearest_of(list(by_key.values())))}
    for row in rows:
        slowdowns, default = row.study.slowdowns, row.study.default
        yield Loss(row, "pick", slowdowns.get(row.study.choice.pick))
        if (item := held_out.get(row.study.problem)) is not None:
            yield Loss(row, "nearest", _finite(item.nearest))
            yield Loss(row, "fallback", _finite(item.fallback))
        if default:
            yield Loss(row, "default", slowdowns.get(default))


def _finite(slowdown: float | None) -> float | None:
    return None if slowdown is None or math.isinf(slowdown) else slowdown  # infinite: the config failed


def page(contents: Contents) -> Page | None:
    """Return the page; None if nothing was timed here."""
    results = list(losses(contents.rows))
    if not results:
        return None
    text = (
        "A lookup returns the row of a size's key; without one, the row of the nearest key or the fallback row for any "
        "size; without those, the declared default."
    )
    return Page("lookups", "Lookups", text, (_losses(results),))


def _losses(results: Sequence[Loss]) -> Part:
    columns: list[Column[Loss]] = [
        *size_columns(lambda loss: loss.row),
        Column("rule", "rule", lambda loss: loss.rule),
        Column("loss", "slower than the best, %", lambda loss: loss.percent, 1),
        *place_columns(lambda loss: loss.row),
    ]
    return Part(
        "losses",
        "Loss of each rule",
        "Each measured size is left out in turn and looked up without it; other device: the pick of another device. "
        f"Of each kernel and device the first {HELD_OUT} sizes. Rows without a number: the config has no time there.",
        table(columns, results[:LISTED], limit_note(len(results))),
        _losses_chart(),
    )


def _losses_chart() -> Chart:
    import altair as alt

    axis = alt.Axis(values=[0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])  # many small losses and a few large ones
    scale = alt.Scale(domain=list(RULES), range=list(RULES.values()))
    marks = (
        chart()
        .mark_point(filled=True, size=24, opacity=0.6)
        .transform_filter("isValid(datum.loss)")
        .encode(
            x=alt.X("loss:Q", title="slower than the best, %", scale=alt.Scale(type="symlog", constant=1), axis=axis),
            y=alt.Y("kernel:N", title=None),
            yOffset=alt.YOffset("rule:N", sort=list(RULES)),
            color=alt.Color("rule:N", title=None, scale=scale),
            href="href:N",
            tooltip=["kernel:N", "shape:N", "device:N", "rule:N", alt.Tooltip("loss:Q", format=".1f")],
        )
    )
    return sized(marks, "kernel", 38)
