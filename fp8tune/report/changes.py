"""Two revisions, row by row: the change with its interval, the control arm, and what would have been found.

Reads the document that ``fp8tune compare --format json`` prints, so that a comparison on a GPU can be shown anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8tune.errors import UsageError
from fp8tune.report.charts import BLUE, GREEN, GREY, ORANGE, PINK, WIDTH, chart, colours
from fp8tune.report.view import Column, Part, Picture, Value, View, table
from fp8tune.text import visible

Document = Mapping[str, Any]

VERDICTS = {
    "REGRESSION": ORANGE,
    "NEWLY-WRONG": PINK,
    "INCONCLUSIVE": "#a0762a",
    "CLEAR": BLUE,
    "IMPROVEMENT": GREEN,
    "SAME-CODE": GREY,
    "NEW": "#7a6fc0",
    "REMOVED": "#7a6fc0",
    "no rows": GREY,
}


@dataclass(frozen=True)
class Change:
    """One row of a comparison, in percent of the time before."""

    label: str
    read: Document

    def value(self, name: str) -> Value:
        """A field of the document; None for what is no text or number."""
        found = self.read.get(name)
        if isinstance(found, float) and not math.isfinite(found):
            return None
        return found if isinstance(found, str | int | float) else None

    def percent(self, name: str, place: int | None = None) -> float | None:
        """A ratio of the document as a change; ``place``: of a pair."""
        found = self.read.get(name)
        if place is not None:
            found = found[place] if isinstance(found, list) and len(found) == 2 else None
        is_ratio = isinstance(found, int | float) and math.isfinite(found)
        return 100 * (float(found) - 1) if is_ratio else None  # type: ignore[arg-type]


def view(document: Document) -> View:
    """The page of a comparison. Raises UsageError for a document that is none."""
    try:
        before, after = (f"{document[side]['name']} ({document[side]['commit'][:12]})" for side in ("before", "after"))
        rows = [_change(row) for row in document["rows"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"this is no comparison, {error!r:.60} is missing: fp8tune compare --format json prints one"
        ) from None
    rows.sort(key=lambda change: change.percent("ratio") or 0.0, reverse=True)
    rows.sort(key=lambda change: change.percent("ratio") is None)
    mean, control = document.get("geomean"), document.get("control")
    facts = [("before", before), ("after", after)]
    facts += [("change in the mean", f"{100 * (mean - 1):+.2f} %")] if isinstance(mean, int | float) else []
    facts += [("control arm", f"{100 * (control - 1):+.2f} %")] if isinstance(control, int | float) else []
    says = (
        "What changed between two revisions. The control arm runs the first revision once more, in the same turns: it "
        "shows what this machine makes of no change."
    )
    return View(
        "changes", "Before and after", says, (_changes(rows),), tuple((name, visible(text)) for name, text in facts)
    )


def read(path: Path) -> Document:
    """The document in a file. Raises UsageError for a file that is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON: write it with fp8tune compare A..B --format json > {path}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no comparison: write it with fp8tune compare A..B --format json > {path}")
    return found


def _change(row: Document) -> Change:
    shape = " ".join(f"{name}={size}" for name, size in (row["shape"] or {}).items())
    said = [row["kernel"], shape, row.get("routing"), row.get("device")]
    return Change(visible(" ".join(str(each) for each in said if each and each != "none")), row)


def _changes(rows: Sequence[Change]) -> Part:
    def text(name: str) -> Any:
        return lambda change: visible(str(change.value(name) or ""))

    columns: list[Column[Change]] = [
        Column("row", "row", lambda change: change.label),
        Column("kernel", "kernel", text("kernel"), is_hidden=True),
        Column("device", "device", text("device"), is_hidden=True),
        Column("verdict", "verdict", text("verdict")),
        Column("before", "before, us", lambda change: change.value("before_us"), 1),
        Column("after", "after, us", lambda change: change.value("after_us"), 1),
        Column("change", "change, %", lambda change: change.percent("ratio"), 2),
        Column("low", "at least, %", lambda change: change.percent("interval", 0), 2),
        Column("high", "at most, %", lambda change: change.percent("interval", 1), 2),
        Column("control", "control arm, %", lambda change: change.percent("control"), 2),
        Column("found", "would be found from, %", lambda change: change.percent("smallest_detectable"), 2),
        Column("n", "rounds or processes", lambda change: change.value("n")),
        Column("reason", "why", text("reason")),
    ]
    drawn = [change for change in rows if change.percent("ratio") is not None]
    return Part(
        "changes",
        "The change of each row",
        "Sorted by the change, the slowest first. The line is its interval; the cross is the control arm; the tick "
        "is the smallest slowdown that such data would call a regression in 95 % of runs.",
        table(columns, rows),
        _chart(drawn) if drawn else None,
        "No kernel is declared at either revision.",
    )


def _chart(rows: Sequence[Change]) -> Picture:
    import altair as alt

    def is_known(name: str) -> bool:  # of what nobody knows Vega would make a scale without an extent
        return any(change.read.get(name) is not None for change in rows)

    y = alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelLimit=330))
    base = chart().transform_filter("isValid(datum.change)").encode(y=y)
    present = [str(change.value("verdict")) for change in rows]
    color = alt.Color("verdict:N", title=None, scale=colours(VERDICTS, present))
    x = alt.X("change:Q", title="change of the time, %")
    zero = alt.Chart(alt.InlineData([{"x": 0}])).mark_rule(color="currentColor", opacity=0.5).encode(x="x:Q")
    layers = [zero]
    if is_known("interval"):
        layers.append(base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q", color=color))
    if is_known("control"):
        layers.append(base.mark_point(shape="cross", size=40, color=GREY).encode(x="control:Q"))
    if is_known("smallest_detectable"):
        layers.append(base.mark_tick(color="currentColor", opacity=0.6).encode(x="found:Q"))
    dots = base.mark_point(filled=True, size=50).encode(
        x=x, color=color, tooltip=["row:N", "verdict:N", "change:Q", "low:Q", "high:Q", "control:Q", "found:Q"]
    )
    return alt.layer(*layers, dots).properties(width=WIDTH - 240, height=alt.Step(16))
