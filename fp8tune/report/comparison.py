"""HTML page of one comparison, in the style of the report. It needs no script, so it is small enough to attach."""

from __future__ import annotations

import html
from collections.abc import Sequence
from string import Template
from typing import Any

from fp8tune.report.html import asset
from fp8tune.text import visible

WIDTH, HEIGHT, EDGE = 260, 18, 0.1  # pixels of the chart of a row, and the change in speed at its edges

HEADINGS = ("verdict", "kernel", "size", "GPU", "speedup", "95 % interval", "A us", "B us", "detects", "reason")

NUMBERS = (4, 6, 7, 8)  # columns of numbers


def document(comparison: Any, title: str, lines: Sequence[str], sizes: Sequence[str]) -> str:
    """Return the page for a document of ``compare``, its title and lines of text, and the text of each row's size."""
    heads = "".join(f"<th{_kind(place)}>{name}</th>" for place, name in enumerate(HEADINGS))
    rows = "\n".join(_row(row, size) for row, size in zip(comparison.rows, sizes, strict=True))
    table = f"<table><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>" if comparison.rows else ""
    explanation = (
        f"Marks left of the line are slower; the shaded band is 0.5 %, the width {100 * EDGE:g} % to either side, and "
        "triangles at the edge lie beyond it. Lines are 95 % confidence intervals, crosses the A/A control."
    )
    texts = "\n".join(f"<p>{_text(line)}</p>" for line in [*lines, explanation] if line)
    return Template(asset("comparison.html")).substitute(
        title=_text(title), style=asset("page.css"), table=table, texts=texts
    )


def _row(row: Any, size: str) -> str:
    detects = "" if row.detectable is None else f"{100 * row.detectable:.1f} %"
    speedup = "" if row.speedup is None else f"{row.speedup:.3f}x"
    times = ["" if time_us is None else f"{time_us:,.4g}" for time_us in (row.before_us, row.after_us)]
    reason = "; ".join(filter(None, [row.reason, *row.disturbances]))
    texts = [row.verdict, row.kernel, size, row.gpu, speedup, _chart(row), *times, detects, reason]
    cells = [text if place == 5 else _text(text) for place, text in enumerate(texts)]
    first, *rest = (f"{_kind(place)}>{cell}" for place, cell in enumerate(cells))
    others = "".join(f"<td{cell}</td>" for cell in rest)
    return f'<tr class="{_text(row.verdict)}"><th scope="row"{first}</th>{others}</tr>'


def _kind(place: int) -> str:
    return ' class="number"' if place in NUMBERS else ' class="long"' if place == len(HEADINGS) - 1 else ""


def _chart(row: Any) -> str:
    """Draw a row's speedup with its interval and control."""
    if row.speedup is None:
        return ""
    middle, x = HEIGHT / 2, _x(row.speedup)
    band = _x(0.995), _x(1.005) - _x(0.995)
    marks = [f'<rect x="{band[0]:.1f}" width="{band[1]:.1f}" height="{HEIGHT}" opacity=".15"/>']
    marks.append(f'<line x1="{_x(1):.1f}" x2="{_x(1):.1f}" y2="{HEIGHT}" opacity=".5"/>')
    if row.lower is not None and row.upper is not None:
        marks.append(f'<line x1="{_x(row.lower):.1f}" x2="{_x(row.upper):.1f}" y1="{middle}" y2="{middle}"/>')
    if row.control is not None:
        place = _x(1 / (1 + row.control))
        marks.append(f'<path class="control" d="M{place - 3:.1f} {middle - 3}l6 6m0-6l-6 6"/>')
    if abs(row.speedup - 1) > EDGE:
        tip = 8 if row.speedup > 1 else -8
        marks.append(f'<path class="mark" d="M{x - tip:.1f} {middle - 5}v10l{tip}-5z"/>')
    else:
        marks.append(f'<circle class="mark" cx="{x:.1f}" cy="{middle}" r="4"/>')
    return f'<svg class="interval" width="{WIDTH}" height="{HEIGHT}" aria-hidden="true">{"".join(marks)}</svg>'


def _x(speedup: float) -> float:
    """Return the horizontal place of a speedup; values beyond the edges are drawn there."""
    share = (min(max(speedup - 1, -EDGE), EDGE) + EDGE) / (2 * EDGE)
    return 8 + share * (WIDTH - 16)


def _text(text: str) -> str:
    return html.escape(visible(str(text)))
