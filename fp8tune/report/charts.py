"""What all pictures share: size, colours, and how they read rows.

Text and lines take the page's colour (``currentColor``), so that one picture suits light, dark and paper. Colours of
marks follow the palette of Okabe and Ito (2008), which colour-blind people tell apart; each has a contrast of 3 or
more against white and against the dark page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8tune.report.view import ROWS, Picture

if TYPE_CHECKING:
    import altair as alt

BLUE, ORANGE, GREEN, PINK, GREY = "#2f7fc1", "#d55e00", "#00936c", "#b85c95", "#808080"

WIDTH = 640
"""Pixels: fits an A4 page; a narrower screen scales it."""

ROLES = {"pick": ORANGE, "default": BLUE, "in the table": GREEN, "finalist": PINK, "other": GREY}
"""What a config is among those of a problem -> its colour."""

VERDICTS = {
    "certified": GREEN,
    "near-tie": BLUE,
    "kept-incumbent": "#7a6fc0",
    "only": "#4d4d4d",
    "ambiguous": ORANGE,
    "unresolvable": PINK,
    "quick": GREY,
    "published": "#a0762a",
}

CONFIG: Mapping[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "domainColor": "currentColor",
        "tickColor": "currentColor",
        "gridColor": "currentColor",
        "gridOpacity": 0.15,
        "labelLimit": 260,
    },
    "legend": {"labelColor": "currentColor", "titleColor": "currentColor", "orient": "bottom", "labelLimit": 260},
    "header": {"labelColor": "currentColor", "titleColor": "currentColor"},
    "title": {"color": "currentColor"},
    "text": {"color": "currentColor"},
    "view": {"stroke": None},
    "scale": {"invalid": {"color": {"value": "transparent"}}},  # a cell without a value is empty, not zero
}


def chart(**given: Any) -> alt.Chart:
    """A picture of the rows of its part."""
    import altair as alt

    return alt.Chart(alt.NamedData(ROWS), **given)


def loss_axis() -> alt.X:
    """The axis of a column ``loss`` in percent, which has many small values and a few that are huge."""
    import altair as alt

    axis = alt.Axis(values=[0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
    return alt.X("loss:Q", title="loses, %", scale=alt.Scale(type="symlog", constant=1), axis=axis)


def colours(of: Mapping[str, str], present: Sequence[str]) -> alt.Scale:
    """A scale with the colours of the names that are present."""
    import altair as alt

    names = [name for name in of if name in present]
    return alt.Scale(domain=names, range=[of[name] for name in names])


def spec(picture: Picture) -> dict[str, Any]:
    """The picture as Vega-Lite, without rows."""
    made: dict[str, Any] = picture.to_dict(validate=False)  # the tests do it: half a second for what never changes
    made.pop("$schema", None)  # an address: the file asks nobody
    made["config"] = dict(CONFIG)
    return made
