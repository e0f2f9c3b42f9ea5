"""Pages of a database, and the files that they are written to: one HTML file, or an SVG file per chart."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fp8tune import __version__
from fp8tune.redaction import redacted
from fp8tune.report import html, limits, lookups, overview, sizes
from fp8tune.report.charts import FIGURE_WIDTH, spec
from fp8tune.report.contents import Contents, Progress
from fp8tune.report.parts import ROWS, Page, Part
from fp8tune.tables.files import File, update, write


def pages(contents: Contents) -> list[Page]:
    """Return the pages over all rows that have something to show; always the overview."""
    optional = (limits.page(contents), lookups.page(contents))
    return [overview.page(contents), *(page for page in optional if page is not None)]


def write_html(contents: Contents, kernels: Sequence[str], output: Path) -> int:
    """Write the whole HTML file, or nothing; return its size in bytes. Raises UsageError if it cannot be written."""
    title = "fp8tune report" + (f": {', '.join(kernels)}" if 0 < len(kernels) <= 3 else "")
    size_pages = [
        (sizes.page(row, title), {"kernel": row.kernel, "device": row.device}) for row, title in contents.titles.items()
    ]
    text = html.document(title, _about(contents.label), pages(contents), size_pages)
    update(output, text)
    return len(text.encode())


def write_figures(contents: Contents, with_sizes: bool, folder: Path, progress: Progress) -> int:
    """Write each chart into an SVG file of its own; return their number. Raises UsageError like write_html."""
    size_pages = [sizes.page(row, title) for row, title in contents.titles.items()] if with_sizes else []
    parts = [(page.id, part) for page in pages(contents) for part in page.parts]
    parts += [
        (f"{re.sub('[^A-Za-z0-9]+', '-', page.title)[:80]}-{page.id}", part)
        for page in size_pages
        for part in page.parts
    ]
    drawn = [(prefix, part) for prefix, part in parts if part.chart is not None and part.table.rows]
    for number, (prefix, part) in enumerate(drawn):
        progress("drawing", number / len(drawn))
        write([File(PurePosixPath(f"{prefix}-{part.id}.svg"), _svg(part))], folder)
    return len(drawn)


def _svg(part: Part) -> str:
    """Return a chart with its title, dark on white."""
    import vl_convert

    vega = spec(part.chart)
    vega["datasets"] = {**vega.get("datasets", {}), ROWS: part.table.records()}
    vega |= {"background": "white", "title": part.title, "width": FIGURE_WIDTH}
    if (size := vega.get("usermeta")) is not None:
        vega["height"] = size["step"] * len({row[size["column"]] for row in part.table.records()})
    text: str = vl_convert.vegalite_to_svg(vega, vl_version=html.VEGA_LITE)
    return text


def _about(label: str) -> str:
    """Describe source and date. Only names of paths are written, because reports are sent to others."""
    label = redacted(label) if "://" in label else " over ".join(Path(part).name for part in label.split(" over "))
    return f"{label}, read by fp8tune {__version__} on {time.strftime('%Y-%m-%d', time.gmtime())}"
