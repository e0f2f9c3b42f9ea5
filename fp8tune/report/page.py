"""All views in one HTML file, which opens by double-click and asks no network.

The file holds the style, the script, Vega with Vega-Lite, and the views' rows as compressed JSON. Its content policy
lets exactly these scripts run, by their hashes, and no request leave: what a database says is never markup or code.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from fp8tune.report.charts import spec
from fp8tune.report.view import Column, Part, Table, Value, View

Json = dict[str, Any]

VEGA_LITE = "6.4"
"""Of the pictures; Altair writes it."""


@dataclass(frozen=True, eq=False)
class Page:
    """All of a report."""

    title: str
    about: str
    """Where its rows are from, and when it was made."""
    views: Sequence[View]
    problems: Sequence[tuple[View, Json]] = field(default=())
    """A view a problem, with what filters read of it: ``kernel`` and ``device``."""


def written(page: Page) -> str:
    """The page as HTML."""
    templates = _Templates()
    content = {
        "title": page.title,
        "about": page.about,
        "views": [templates.packed(view) for view in page.views],
        "problems": [templates.packed(view) | read for view, read in page.problems],
        "templates": templates.all,
        "filters": {name: _values(page, name) for name in ("kernel", "device")},
    }
    scripts = [_library(), _asset("page.js")]
    style, policy = _asset("page.css"), _policy(scripts)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(page.title)}</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#main">Skip to the content</a>',
            f'<header><h1 id="title">{html.escape(page.title)}</h1>',
            f'<p id="about">{html.escape(page.about)}</p>',
            '<nav aria-label="Views"><ul id="tabs"></ul></nav>',
            '<form id="filters" aria-label="Filter"></form></header>',
            '<main id="main" tabindex="-1"><noscript><p>This page draws its tables and pictures with a script of its '
            "own: allow it to run. It asks no network.</p></noscript></main>",
            f'<script id="data" type="text/plain">{_packed(content)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


class _Templates:
    """What parts have in common but for their rows: of a thousand problems a few, each written once."""

    def __init__(self) -> None:
        self.all: list[Json] = []
        self._places: dict[Hashable, int] = {}

    def packed(self, view: View) -> Json:
        """A view as the script reads it."""
        parts = [self._part(part) for part in view.parts]
        return {"id": view.id, "title": view.title, "says": view.says, "facts": view.facts, "parts": parts}

    def _part(self, part: Part) -> Json:
        words = {"id": part.id, "title": part.title, "says": part.says, "empty": part.empty}
        columns = [_column(column) for column in part.table.columns]
        # problems share their pictures: to compare them written out would take as long as to read the rows
        key = (*words.values(), *(tuple(column.values()) for column in columns), id(part.chart))
        if key not in self._places:
            self._places[key] = len(self.all)
            self.all.append(words | {"columns": columns, "chart": None if part.chart is None else spec(part.chart)})
        table = part.table
        return {
            "template": self._places[key],
            "length": len(table.rows),
            "columns": list(_columns(table)),
            "left_out": table.left_out,
        }


def _column(column: Column[object]) -> Json:
    return {
        "name": column.name,
        "title": column.title,
        "digits": column.digits,
        "link": column.link,
        "hidden": column.is_hidden,
    }


def _columns(table: Table) -> Iterator[list[Value] | Json]:
    """Each column's values; texts by their places in a list of names."""
    for number in range(len(table.columns)):
        values = [row[number] for row in table.rows]
        if any(isinstance(value, str) for value in values):
            places = {value: place for place, value in enumerate(dict.fromkeys(values))}
            yield {"names": list(places), "places": [places[value] for value in values]}
        else:
            yield values


def _values(page: Page, name: str) -> list[str]:
    """What a filter offers: the texts of every column of that name."""
    found = {read[name] for _, read in page.problems}
    for table in (part.table for view in page.views for part in view.parts):
        for number, column in enumerate(table.columns):
            if column.name == name:
                found |= {str(row[number]) for row in table.rows if row[number]}
    return sorted(found)


def _packed(content: Json) -> str:
    """Compressed, in letters: nothing of it can be markup. The same content gives the same text."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    return bundle.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return files("fp8tune.report").joinpath("assets", name).read_text("utf-8")


def _policy(scripts: Iterable[str]) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
