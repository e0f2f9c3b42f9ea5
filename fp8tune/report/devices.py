"""The pick of one device on another: what it loses there against the other's own best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from fp8tune.records import Kind
from fp8tune.report.charts import BLUE, WIDTH, chart, loss_axis
from fp8tune.report.contents import LISTED, Contents, Row, cut
from fp8tune.report.view import Column, Part, Picture, View, table
from fp8tune.stats.means import group_by


@dataclass(frozen=True)
class Moved:
    """A pick and what it loses on another device that measured the same problem."""

    there: Row
    """The other device's row."""
    of: str
    """The device whose pick it is."""
    config: str
    slowdown: float | None
    """Over the best config there; None where that device has no time of it."""


def moved(rows: Sequence[Row]) -> Iterator[Moved]:
    """Each measured pick on each other device that has the problem."""
    timed = [row for row in rows if row.study.kind is not Kind.PUBLISHED]
    for same in group_by(timed, lambda row: (row.study.problem, row.study.kind)).values():
        for here, there in permutations(same, 2):
            config = here.study.pick.config
            if config is not None:
                slowdown = there.study.slowdowns.get(config)
                yield Moved(there, here.device, str(config), slowdown)


def view(found: Contents) -> View | None:
    """None where no problem was measured on two devices."""
    rows = list(moved(found.rows))
    if not rows:
        return None
    columns: list[Column[Moved]] = [
        Column("kernel", "kernel", lambda row: row.there.kernel, link="href"),
        Column("href", "link", lambda row: row.there.href, is_hidden=True),
        Column("shape", "shape", lambda row: str(row.there.study.problem.shape)),
        Column("routing", "routing", lambda row: row.there.study.problem.routing),
        Column("of", "pick of", lambda row: row.of),
        Column("device", "on", lambda row: row.there.device),
        Column("config", "config", lambda row: row.config),
        Column("loss", "loses, %", lambda row: None if row.slowdown is None else 100 * (row.slowdown - 1), 1),
    ]
    part = Part(
        "moved",
        "The same pick on another device",
        "What a device loses with the other's pick, against its own best config. Rows without a number are configs "
        "that the device did not time.",
        table(columns, rows[:LISTED], cut(len(rows))),
        _chart(),
    )
    return View("devices", "Across devices", "Whether one table would do for several devices.", (part,))


def _chart() -> Picture:
    import altair as alt

    return (
        chart()
        .mark_point(filled=True, size=30, opacity=0.6, color=BLUE)
        .transform_filter("isValid(datum.loss)")
        .encode(
            x=loss_axis(),
            y=alt.Y("kernel:N", title=None),
            row=alt.Row("device:N", title="on"),
            href="href:N",
            tooltip=["kernel:N", "shape:N", "of:N", "device:N", alt.Tooltip("loss:Q", format=".1f")],
        )
        .properties(width=WIDTH - 60, height=alt.Step(18))
    )
