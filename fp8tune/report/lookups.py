"""What a lookup loses on shapes that nobody measured, and what to sweep next."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8tune.plan import shapes
from fp8tune.records import Kind, NamedInts, Problem
from fp8tune.report.charts import BLUE, GREEN, GREY, ORANGE, WIDTH, chart, loss_axis
from fp8tune.report.contents import LISTED, Contents, Row, cut, named
from fp8tune.report.view import Column, Part, Picture, View, table
from fp8tune.stats.means import group_by
from fp8tune.stats.shared import hold_out, regret
from fp8tune.stats.study import Verdict
from fp8tune.tables.select import nearest_of
from fp8tune_kernels import tables

RULES = {"pick": GREEN, "nearest": BLUE, "fallback": ORANGE, "default": GREY}
"""By which rule a config is chosen -> its colour."""

MOST = 200
"""Problems of one kernel and device that are left out in turn: the time grows with their square."""


@dataclass(frozen=True)
class Loss:
    """What one rule loses on one problem."""

    row: Row
    rule: str
    slowdown: float | None
    """Over the best config's time; None where the rule's config has no time there."""


def _places(rows: Sequence[Row]) -> list[list[Row]]:
    """The timed rows of each kernel and device."""
    timed = [row for row in rows if row.study.kind is not Kind.PUBLISHED]
    return list(group_by(timed, lambda row: (row.kernel, row.study.device.name, row.study.kind)).values())


def losses(rows: Sequence[Row]) -> Iterator[Loss]:
    """The loss of every rule on each problem, its own shape left out for *nearest* and *fallback*."""
    for of_place in _places(rows):
        yield from _of_place(of_place[:MOST])


def _of_place(rows: Sequence[Row]) -> Iterator[Loss]:
    found = [row.study for row in rows]
    keyed: dict[tuple[object, ...], tables.Row] = {}
    for one in found:
        if one.is_usable and one.lookup_key is not None and one.pick.config is not None:
            key = tuple(sorted(one.lookup_key.items()))
            keyed.setdefault(key, (one.problem.kernel, "", key, tuple(one.pick.config.items())))
    held_out = hold_out(found, (), nearest_of(list(keyed.values())))
    chosen: Mapping[str, Mapping[Problem, float | None]] = {}
    if held_out:
        chosen = {
            "nearest": {item.study.problem: _known(item.nearest) for item in held_out},
            "fallback": {item.study.problem: _known(item.fallback) for item in held_out},
        }
    for row in rows:
        slowdowns = row.study.slowdowns
        if row.study.pick.config is None:
            continue
        yield Loss(row, "pick", slowdowns.get(row.study.pick.config))
        for rule, of_problem in chosen.items():
            if row.study.problem in of_problem:
                yield Loss(row, rule, of_problem[row.study.problem])
        if row.study.default:
            yield Loss(row, "default", slowdowns.get(row.study.default))


def _known(slowdown: float | None) -> float | None:
    """Return None for a config that failed, as for one without a time."""
    return None if slowdown is None or math.isinf(slowdown) else slowdown


def view(found: Contents) -> View | None:
    """None where nothing was timed here."""
    lost = list(losses(found.rows))
    if not lost:
        return None
    is_cut = any(len(of_place) > MOST for of_place in _places(found.rows))
    left_out = f"Of each kernel and device the first {MOST} problems." if is_cut else ""
    return View(
        "lookups",
        "Lookups",
        "A lookup gives the row of a shape's key; without one that of the nearest key, or the row for any shape "
        "(the fallback); without those the declared default.",
        (_losses(lost, left_out), _means(lost), _next(found.rows)),
    )


def _percent(slowdown: float | None) -> float | None:
    return None if slowdown is None else 100 * (slowdown - 1)


def _losses(lost: Sequence[Loss], left_out: str) -> Part:
    columns: list[Column[Loss]] = [
        *named(lambda loss: loss.row),
        Column("rule", "rule", lambda loss: loss.rule),
        Column("loss", "loses, %", lambda loss: _percent(loss.slowdown), 1),
    ]
    return Part(
        "losses",
        "What each rule loses",
        "Each measured shape is left out in turn and looked up without it. The loss is against the best config there. "
        "Rows without a number got a config that has no time on the shape.",
        table(columns, lost[:LISTED], " ".join(filter(None, (left_out, cut(len(lost)))))),
        _losses_chart(),
    )


def _losses_chart() -> Picture:
    import altair as alt

    scale = alt.Scale(domain=list(RULES), range=list(RULES.values()))
    return (
        chart()
        .mark_point(filled=True, size=24, opacity=0.6)
        .transform_filter("isValid(datum.loss)")
        .encode(
            x=loss_axis(),
            y=alt.Y("kernel:N", title=None),
            yOffset=alt.YOffset("rule:N", sort=list(RULES)),
            color=alt.Color("rule:N", title=None, scale=scale),
            href="href:N",
            tooltip=["kernel:N", "shape:N", "device:N", "rule:N", alt.Tooltip("loss:Q", format=".1f")],
        )
        .properties(width=WIDTH, height=alt.Step(34, **{"for": "position"}))
    )


@dataclass(frozen=True)
class _Mean:
    kernel: str
    device: str
    rule: str
    problems: int
    untimed: int
    mean: float | None
    worst: float | None


def _means(lost: Sequence[Loss]) -> Part:
    def place(loss: Loss) -> tuple[str, str, str]:
        return loss.row.kernel, loss.row.device, loss.rule

    found = []
    for (kernel, device, rule), of_rule in group_by(lost, place).items():
        loss = regret(loss.slowdown for loss in of_rule)
        found.append(_Mean(kernel, device, rule, len(of_rule), loss.unknown, loss.mean, loss.worst))
    found.sort(key=lambda mean: (mean.kernel, mean.device, list(RULES).index(mean.rule)))
    columns: list[Column[_Mean]] = [
        Column("kernel", "kernel", lambda mean: mean.kernel),
        Column("device", "device", lambda mean: mean.device),
        Column("rule", "rule", lambda mean: mean.rule),
        Column("problems", "problems", lambda mean: mean.problems),
        Column("untimed", "without a time", lambda mean: mean.untimed),
        Column("mean", "loses in the mean, %", lambda mean: _percent(mean.mean), 1),
        Column("worst", "at worst, %", lambda mean: _percent(mean.worst), 1),
    ]
    says = "The geometric mean over the problems of a kernel on one device, and the worst of them."
    return Part("means", "In the mean", says, table(columns, found))


@dataclass(frozen=True)
class _Todo:
    why: str
    kernel: str
    arch: str
    problems: int
    command: str


def _next(rows: Sequence[Row]) -> Part:
    """What more measuring would settle, the most rows first."""
    found = []
    for why, verdicts, option in (
        ("finals could not tell", (Verdict.OPEN,), "--again"),
        ("screened only: no finals", (Verdict.QUICK,), ""),
    ):
        open_rows = [row for row in rows if row.study.choice.verdict in verdicts and row.study.kind is Kind.MEASURED]
        by_place = group_by(open_rows, lambda row: (row.kernel, row.study.device.arch))
        for (kernel, arch), of_place in by_place.items():
            found.append(_Todo(why, kernel, arch, len(of_place), _command(kernel, of_place, option)))
    found.sort(key=lambda todo: (-todo.problems, todo.kernel))
    columns: list[Column[_Todo]] = [
        Column("why", "why", lambda todo: todo.why),
        Column("kernel", "kernel", lambda todo: todo.kernel),
        Column("arch", "arch", lambda todo: todo.arch),
        Column("problems", "problems", lambda todo: todo.problems),
        Column("command", "command, on a GPU of that arch", lambda todo: todo.command),
    ]
    return Part(
        "next",
        "What to sweep next",
        "Commands that settle rows which are open. For a shape of your own, put it in a file: "
        "fp8tune sweep --kernel NAME --shapes mine.toml.",
        table(columns, found),
        empty="Every measured row is settled.",
    )


def _command(kernel: str, rows: Sequence[Row], option: str) -> str:
    sets = _sets([row.study.problem.shape for row in rows])
    words = ["fp8tune", "sweep", "--kernel", kernel, *(word for name in sets for word in ("--shapes", name))]
    return shlex.join([*words, option] if option else words)


def _sets(found: Sequence[NamedInts]) -> list[str]:
    """The shape sets that have the most of these shapes, until those that any set has are covered."""
    left, chosen = list(found), []
    known = {name: shapes.load(name).rows for name in shapes.list_sets()}
    while left:
        counts = Counter({name: sum(_is_of(shape, rows) for shape in left) for name, rows in known.items()})
        name, count = max(sorted(counts.items()), key=lambda item: item[1])
        if not count:
            break
        chosen.append(name)
        left = [shape for shape in left if not _is_of(shape, known[name])]
    return chosen


def _is_of(shape: NamedInts, rows: Sequence[NamedInts]) -> bool:
    """Whether a row has the sizes of a problem: its groups are the row's experts, and N and K may change places."""
    sizes = {"E" if dim == "G" else dim: size for dim, size in shape.items() if dim in ("M", "K", "N", "G", "E")}
    swapped = {**sizes, "N": sizes["K"], "K": sizes["N"]} if {"N", "K"} <= sizes.keys() else sizes
    return any(each.items() <= row.items() for row in rows for each in (sizes, swapped))
