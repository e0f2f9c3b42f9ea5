"""Each picture as an SVG file of its own, for a paper, a talk or a README."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8tune.report.charts import spec
from fp8tune.report.page import VEGA_LITE
from fp8tune.report.view import ROWS, Part, View


@dataclass(frozen=True, eq=False)
class Figure:
    """A picture and the name of its file."""

    name: str
    part: Part

    def svg(self) -> str:
        """The picture with its title, dark on white."""
        import vl_convert

        assert self.part.chart is not None
        made = spec(self.part.chart)
        made["datasets"] = {**made.get("datasets", {}), ROWS: self.part.table.named()}
        made["background"] = "white"
        made["title"] = self.part.title
        written: str = vl_convert.vegalite_to_svg(made, vl_version=VEGA_LITE)
        return written

    def write(self, folder: Path) -> Path:
        """The file. Raises OSError if it cannot be written."""
        path = folder / f"{self.name}.svg"
        path.write_text(self.svg(), "utf-8")
        return path


def figures(views: Iterable[View], problems: Iterable[View]) -> Iterator[Figure]:
    """Every picture of some views, each under a name that no other has."""
    for view in views:
        for part in view.parts:
            if part.chart is not None and part.table.rows:
                yield Figure(f"{view.id}-{part.id}", part)
    for view in problems:
        for part in view.parts:
            if part.chart is not None and part.table.rows:
                yield Figure(f"{_plain(view.title)}-{view.id}-{part.id}", part)


def _plain(title: str) -> str:
    """A title as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-")[:80]
