"""One report type: columns over rows, as a table on a terminal or in a file, as markdown, as HTML.

What programs read, JSON and CSV, has the fields of :mod:`fp8tune.render.contracts` instead of columns.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8tune.render.terminal import print_csv, print_json
from fp8tune.text import visible

R = TypeVar("R")

GAP = 2
"""Blanks between two columns."""


@dataclass(frozen=True)
class Column(Generic[R]):
    """A header, the side its cells stand at, and the text of a row's cell."""

    header: str
    side: Literal["left", "right"]
    cell: Callable[[R], str]


def left(header: str, cell: Callable[[R], str]) -> Column[R]:
    """A column of names."""
    return Column(header, "left", cell)


def right(header: str, cell: Callable[[R], str]) -> Column[R]:
    """A column of numbers."""
    return Column(header, "right", cell)


@dataclass(frozen=True)
class Report(Generic[R]):
    """Rows under columns. The first ``names`` columns name a row, and stand in every block of a wide table."""

    title: str
    columns: Sequence[Column[R]]
    rows: Sequence[R]
    names: int = 1
    note: str = ""
    """A line below the title; empty for none."""
    spare: frozenset[str] = frozenset()
    """Headers of columns that only a terminal shows that is wide enough for all, and markdown."""

    def cells(self) -> list[list[str]]:
        """Row by row."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]

    def print(self, output_format: str = "table") -> None:
        """``table`` or ``markdown`` on stdout. A terminal gets a table in blocks of columns that fit its width."""
        if output_format == "markdown":
            print("\n".join([*self._head(), "", self.markdown()]))
        elif sys.stdout.isatty():
            width = Console().width
            (self if len(self._blocks(width)) == 1 else self._without_spare())._print_blocks()
        else:
            print("\n".join([*self._head(), *self._without_spare()._lines()]))

    def _without_spare(self) -> Report[R]:
        return replace(self, columns=[column for column in self.columns if column.header not in self.spare])

    def _blocks(self, width: int) -> list[list[int]]:
        return blocks([column.header for column in self.columns], self.cells(), width, self.names)

    def _head(self) -> list[str]:
        return [visible(line) for line in (self.title, *filter(None, [self.note]))]

    def _lines(self) -> Iterator[str]:
        """The lines of a table that goes to a file or pipe: not folded, because rich takes minutes for a million."""
        lines = [[column.header for column in self.columns], *([visible(cell) for cell in row] for row in self.cells())]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = []
            for column, cell, width in zip(self.columns, line, widths, strict=True):
                blanks = " " * (width - cell_len(cell))
                cells.append(blanks + cell if column.side == "right" else cell + blanks)
            yield (" " * GAP).join(cells).rstrip()

    def _print_blocks(self) -> None:
        console, cells = Console(), self.cells()
        headers = [column.header for column in self.columns]
        for number, block in enumerate(self._blocks(console.width)):
            title = Text("continued" if number else visible(self.title), "table.title")
            grid = Table(box=None, pad_edge=False, header_style="bold")  # its own title would fold at its width
            for i in block:
                grid.add_column("\n".join(_words(headers[i])), justify=self.columns[i].side, overflow="fold")
            for row in cells:
                grid.add_row(*(Text(visible(row[i])) for i in block))
            note = [Text(visible(self.note))] if self.note and not number else []
            console.print(*([""] if number else []), title, *note, grid, sep="\n", markup=False)

    def markdown(self) -> str:
        """A table to paste, without the title."""
        rules = ["---:" if column.side == "right" else "---" for column in self.columns]
        lines = [[column.header for column in self.columns], rules, *self.cells()]
        return "\n".join(f"| {' | '.join(map(markdown_text, line))} |" for line in lines)

    def html(self, style: Callable[[R], str]) -> str:
        """The element ``<table>``, without the title. ``style`` is the CSS class of a row."""

        def line(tag: str, style: str, texts: Sequence[str]) -> str:
            sides = (column.side for column in self.columns)
            cells = (
                f'<{tag} class="{side}">{html_text(cell)}</{tag}>' for side, cell in zip(sides, texts, strict=True)
            )
            return f'<tr class="{html_text(style)}">{"".join(cells)}</tr>'

        header = line("th", "", [column.header for column in self.columns])
        rows = [line("td", style(row), cells) for row, cells in zip(self.rows, self.cells(), strict=True)]
        return "\n".join(["<table>", header, *rows, "</table>"])


def markdown_text(text: str) -> str:
    """A text that ends neither its cell nor its line, and is no HTML."""
    return " ".join(visible(text).split()).replace("|", "\\|").replace("<", "&lt;")


def html_text(text: str) -> str:
    """A text that is no HTML."""
    return html.escape(visible(text))


def blocks(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, names: int) -> list[list[int]]:
    """The columns of each block, as many as fit; headers break at blanks and underscores, cells do not."""
    widths = [max(map(len, (*_words(header), *(row[i] for row in rows)))) for i, header in enumerate(headers)]
    found = [list(range(names))]
    for i in range(names, len(headers)):
        fits = sum(widths[j] + GAP for j in (*found[-1], i)) - GAP <= width
        if not fits and len(found[-1]) > names:
            found.append(list(range(names)))
        found[-1].append(i)
    return found


def _words(header: str) -> list[str]:
    return header.replace("_", " ").split()


def print_report(
    rows: Sequence[R],
    fields: Callable[[R], Mapping[str, object]],
    parts: Iterable[Report[Any] | str],
    output_format: str,
) -> None:
    """What a command found: ``json`` or ``csv`` has the ``fields`` of its rows, anything else the ``parts``."""
    if output_format == "json":
        print_json([fields(row) for row in rows])
    elif output_format == "csv":
        print_csv([fields(row) for row in rows])
    else:
        print_parts(parts, output_format)


def print_parts(parts: Iterable[Report[Any] | str], output_format: str) -> None:
    """Tables, each with a blank line after it, and lines."""
    for part in parts:
        if isinstance(part, str):
            print(visible(part))
        else:
            part.print(output_format)
            print()
