"""Colours, sizes and axes that all charts share.

Text and lines use the page's colour (``currentColor``), so that one chart suits light mode, dark mode and paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8tune.report.parts import ROWS, Chart

if TYPE_CHECKING:
    import altair as alt

# After Okabe and Ito (2008): colour-blind readers can tell them apart, and each has a contrast of 3 or more against
# white and against the dark page.
BLUE, ORANGE, GREEN, PINK, GREY = "#2f7fc1", "#d55e00", "#00936c", "#b85c95", "#808080"

FIGURE_WIDTH = 640  # pixels of an SVG file, for an A4 page; on the page charts fill their column

ROLES = {"pick": ORANGE, "default": BLUE, "today": GREEN, "confirmed": PINK, "coarse pass": GREY}

# all that a database alone shows
VERDICTS = {"proven": GREEN, "open": ORANGE, "alone": BLUE, "quick": GREY, "published": "#a0762a"}

MEANINGS = {
    "proven": "confirmed in fresh processes, no rival is over 1.5 % faster",
    "open": "confirmed, but noise may hide a rival that is over 1.5 % faster",
    "alone": "one config was timed, nothing to compare",
    "quick": "coarse pass in one process, not confirmed",
    "published": "reported by others, not measured here",
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
    "scale": {"invalid": {"color": {"value": "transparent"}}},  # a cell without a value stays empty
}


def chart(**options: Any) -> alt.Chart:
    """Return a chart of its part's rows."""
    import altair as alt

    return alt.Chart(alt.NamedData(ROWS), **options)


def sized(picture: Chart, column: str, step: int) -> Chart:
    """Make a chart as wide as its place on the page, and ``step`` pixels high for each value in a column of its table.

    Vega-Lite's own steps do not go together with a width that fits.
    """
    return picture.properties(width="container", usermeta={"column": column, "step": step})


def whole_axis(**options: Any) -> alt.Axis:
    """Return an axis with ticks at whole numbers only."""
    import altair as alt

    return alt.Axis(tickMinStep=1, format="d", **options)


def colours(palette: Mapping[str, str], present: Sequence[str]) -> alt.Scale:
    """Return a colour scale of the names that are present."""
    import altair as alt

    names = [name for name in palette if name in present]
    return alt.Scale(domain=names, range=[palette[name] for name in names])


def disturbed_mark(title: str = "measured") -> alt.Shape:
    """Return the encoding that draws rows measured under disturbance as crosses."""
    import altair as alt

    scale = alt.Scale(domain=["undisturbed", "disturbed"], range=["circle", "cross"])
    return alt.Shape("quality:N", title=title, scale=scale)


def spec(picture: Chart) -> dict[str, Any]:
    """Return a chart as Vega-Lite without its rows."""
    result: dict[str, Any] = picture.to_dict(validate=False)  # the tests validate; here it would take half a second
    result.pop("$schema", None)  # an address, although the page makes no request
    result["config"] = dict(CONFIG)
    return result
