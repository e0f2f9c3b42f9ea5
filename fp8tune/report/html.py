"""The HTML file of a report, which opens by double-click, works offline and makes no request.

It holds a style, a script, Vega with Vega-Lite, and the rows as compressed JSON. Its content policy allows exactly
these scripts, by their hashes, and no request: text of a database can be neither markup nor code.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from fp8tune.report.charts import spec
from fp8tune.report.parts import Column, Page, Part, Table, Value

Json = dict[str, Any]

VEGA_LITE = "6.4"  # version that Altair writes

FILTERS = ("kernel", "device")  # columns by which the page filters its rows


def document(
    title: str, about: str, pages: Sequence[Page], sizes: Sequence[tuple[Page, Mapping[str, str]]] = ()
) -> str:
    """Return the HTML of a report from its pages, and from the page of each size with its values of :data:`FILTERS`."""
    templates = _Templates()
    content = {
        "title": title,
        "about": about,
        "views": [templates.packed(page) for page in pages],
        "sizes": [{**templates.packed(page), **values} for page, values in sizes],
        "templates": templates.all,
        "filters": {name: sorted({values[name] for _, values in sizes}) for name in FILTERS},
    }
    scripts = [_library(), asset("page.js")]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
    return Template(asset("page.html")).substitute(
        policy=policy,
        title=html.escape(title),
        style=asset("page.css"),
        about=html.escape(about),
        data=_packed(content),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


class _Templates:
    """Parts without their rows. A thousand sizes share a few, and each is written once."""

    def __init__(self) -> None:
        self.all: list[Json] = []
        self._places: dict[Hashable, int] = {}

    def packed(self, page: Page) -> Json:
        """Return a page as the script reads it."""
        parts = [self._part(part) for part in page.parts]
        return {"id": page.id, "title": page.title, "text": page.text, "facts": page.facts, "parts": parts}

    def _part(self, part: Part) -> Json:
        texts = {"id": part.id, "title": part.title, "text": part.text, "empty": part.empty}
        columns = [_column(column) for column in part.table.columns]
        # sizes share chart objects: comparing written charts would take as long as reading the rows
        key = (*texts.values(), *(tuple(column.values()) for column in columns), id(part.chart))
        if key not in self._places:
            self._places[key] = len(self.all)
            self.all.append(texts | {"columns": columns, "chart": None if part.chart is None else spec(part.chart)})
        table = part.table
        return {
            "template": self._places[key],
            "length": len(table.rows),
            "columns": list(_columns(table)),
            "note": table.note,
        }


def _column(column: Column[object]) -> Json:
    names = ("name", "title", "digits", "link", "unit")
    return {name: getattr(column, name) for name in names} | {"hidden": column.is_hidden}


def _columns(table: Table) -> Iterator[list[Value] | Json]:
    """Yield each column's values; texts as places in a list of distinct texts."""
    for number in range(len(table.columns)):
        values = [row[number] for row in table.rows]
        if any(isinstance(value, str) for value in values):
            places = {value: place for place, value in enumerate(dict.fromkeys(values))}
            yield {"names": list(places), "places": [places[value] for value in values]}
        else:
            yield values


def _packed(content: Json) -> str:
    """Compress to base64, which cannot hold markup. Equal content gives equal text."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


@functools.cache
def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    return bundle.replace("</script", "<\\/script")


def asset(name: str) -> str:
    """Return a file of the folder ``assets``."""
    return files("fp8tune.report").joinpath("assets", name).read_text("utf-8")
