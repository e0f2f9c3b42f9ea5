"""The picture of a comparison, in light and dark: docs/images/training-light.svg and training-dark.svg."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from benchmarks.diagrams import IMAGES, PALETTES
from benchmarks.training.summary import REFERENCE
from fp8tune.report.charts import BLUE, CONFIG, GREEN, GREY, ORANGE, PINK

__all__ = ["svgs", "write"]

COLOURS = {
    "bf16": GREY,
    "fp8": BLUE,
    "folded": ORANGE,
    "auto": GREEN,
    "mxfp8": PINK,
    "mlp": "#8a6d1d",
    "layer": "#6f55c0",
}

POINTS = 50
"""Of a curve: each is a mean over the steps since the one before."""


LEGEND = alt.Legend(title=None, orient="bottom", symbolType="stroke", symbolOpacity=1, symbolStrokeWidth=3)


def write(document: Mapping[str, Any]) -> Iterator[Path]:
    """Write both files, and yield their paths."""
    for theme, text in svgs(document).items():
        path = IMAGES / f"training-{theme}.svg"
        path.write_text(text, encoding="utf-8")
        yield path


def svgs(document: Mapping[str, Any]) -> dict[str, str]:
    """Theme -> the file."""
    return {theme: _svg(document, PALETTES[theme]) for theme in PALETTES}


def _svg(document: Mapping[str, Any], palette: Mapping[str, str]) -> str:
    picture: Any = alt.hconcat(_curves(document), _ends(document)).resolve_scale(color="shared")
    made = {**picture.to_dict(), "config": dict(CONFIG)}
    return vl_convert.vegalite_to_svg(json.dumps(made).replace("currentColor", palette["text"]))


def _rows(values: list[dict[str, Any]]) -> Any:
    data: Any = alt.Data
    return alt.Chart(data(values=values))


def _colour(arms: Sequence[str]) -> Any:
    named = [arm for arm in COLOURS if arm in arms]
    scale = alt.Scale(domain=named, range=[COLOURS[arm] for arm in named])
    return alt.Color("arm:N", scale=scale, legend=LEGEND)


def _curves(document: Mapping[str, Any]) -> Any:
    """Over steps, how far the loss is from the least: the mean of the seeds, and their range."""
    runs, floor = document["runs"], document["floor"]
    arms = sorted({run["arm"] for run in runs})
    steps = len(runs[0]["losses"])
    each = max(steps // POINTS, 1)
    rows = []
    for arm in arms:
        for begin in range(0, steps - each + 1, each):
            means = [statistics.fmean(run["losses"][begin : begin + each]) - floor for run in runs if run["arm"] == arm]
            mean = statistics.fmean(means)
            rows.append({"arm": arm, "step": begin + each, "mean": mean, "least": min(means), "most": max(means)})
    base: Any = _rows(rows).encode(x=alt.X("step:Q", title="step"), color=_colour(arms))
    scale = alt.Scale(type="log", nice=False)
    line = base.mark_line(strokeWidth=1.5).encode(y=alt.Y("mean:Q", title="nats a token over the floor", scale=scale))
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("least:Q", scale=scale), y2="most:Q")
    return (band + line).properties(width=300, height=260, title="Loss while training")


def _ends(document: Mapping[str, Any]) -> Any:
    """The held-out loss of each seed less that of bf16's same seed; the band is the spread of bf16's seeds."""
    runs = document["runs"]
    reference = {run["seed"]: run["held_out"] for run in runs if run["arm"] == REFERENCE}
    spread = statistics.stdev(reference.values()) if len(reference) > 1 else 0.0
    arms = [arm for arm in COLOURS if any(run["arm"] == arm for run in runs)]
    rows = [
        {"arm": run["arm"], "difference": run["held_out"] - reference[run["seed"]]}
        for run in runs
        if run["seed"] in reference and run["arm"] != REFERENCE
    ]
    rest = [arm for arm in arms if arm != REFERENCE]
    band = _rows([{"least": -spread, "most": spread}]).mark_rect(color=GREY, opacity=0.15)
    x = alt.X("arm:N", title=None, sort=rest, axis=alt.Axis(labelAngle=0))
    title = "held-out loss less that of bf16, nats"
    dots: Any = _rows(rows).mark_point(filled=True, size=45, opacity=0.8)
    return alt.layer(
        band.encode(y=alt.Y("least:Q", title=title), y2="most:Q"),
        dots.encode(x=x, y=alt.Y("difference:Q", title=title), color=_colour(arms)),
    ).properties(width=220, height=260, title="At the end, seed by seed")
