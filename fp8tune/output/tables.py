"""The one table that a screen has, at any width, with the lines above and below it."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fp8tune.redaction import redacted
from fp8tune.text import visible

if TYPE_CHECKING:
    from fp8tune.output.documents import Document

Format = Literal["table", "markdown", "json", "csv"]

STYLES = dict.fromkeys(("open", "quick", "stale", "OPEN"), "yellow") | dict.fromkeys(
    ("wrong", "REGRESSION", "WRONG", "failed", "lost"), "red"
)
UNLIMITED = 100_000
"""Width of what is not a terminal: nothing is cut there."""

SHORTEST = 8
"""Characters that a cut cell keeps."""

LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Column:
    """A column of finished cells, and what may happen to it in a narrow terminal."""

    heading: str
    cells: Sequence[str]
    align: Literal["left", "right"] = "left"
    styles: Sequence[str] = ()
    cut: Literal["", "start", "end"] = ""
    """The side that an ellipsis replaces if the table is too wide. Names keep their end, so theirs is the start."""
    leaves: Literal["", "before cuts", "after cuts"] = ""
    """When the column is left out of a table that is too wide."""
    wide: bool = False
    """True for columns of ``--wide`` alone."""

    @property
    def width(self) -> int:
        """Width in terminal cells."""
        return max(map(cell_len, [self.heading, *self.cells]))

    def shortened(self, width: int) -> Column:
        """Return the column with cells of at most a width."""

        def cell(text: str) -> str:
            if cell_len(text) <= width:
                return text
            return f"…{text[-width + 1 :]}" if self.cut == "start" else f"{text[: width - 1]}…"

        return replace(self, cells=[cell(text) for text in self.cells])


number = partial(Column, align="right")
"""A column of numbers."""

wide_number = partial(Column, align="right", wide=True)
"""A column of numbers for ``--wide`` alone."""


def words(heading: str, cells: Sequence[str]) -> Column:
    """Return a column of verdicts or states, coloured by word."""
    return Column(heading, cells, styles=[STYLES.get(cell, "") for cell in cells])


def speedups(cells: Sequence[str], heading: str = "speedup") -> Column:
    """Return a column of speedups, in bold."""
    return number(heading, cells, styles=["bold" if cell.endswith("x") else "" for cell in cells])


def fit(columns: Iterable[Column], width: int = UNLIMITED, *, wide: bool = False) -> list[Column]:
    """Return the columns that a width has room for. Columns without cells are left out.

    First columns that leave ``before cuts`` go, then cells are cut from the right, then names, then columns that leave
    ``after cuts`` go. ``wide`` keeps all.
    """
    columns = [column for column in columns if column.cells and (wide or not column.wide)]
    if wide:
        return columns
    columns = _without(columns, width, "before cuts")
    for side in ("end", "start"):
        for place, column in reversed([*enumerate(columns)]):
            excess = _width(columns) - width
            shortest = max(SHORTEST, cell_len(column.heading))
            if column.cut == side and excess > 0 and column.width > shortest:
                columns[place] = column.shortened(max(shortest, column.width - excess))
    return _without(columns, width, "after cuts")


def _without(columns: Sequence[Column], width: int, when: str) -> list[Column]:
    result = list(columns)
    for column in [column for column in reversed(columns) if column.leaves == when]:
        if _width(result) > width:
            result.remove(column)
    return result


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + 2 * (len(columns) - 1)


@dataclass(frozen=True)
class Screen:
    """Lines and one table that a command prints. Empty lines are left out; CSV has ``rows`` alone."""

    above: Sequence[str] = ()
    columns: Sequence[Column] = ()
    below: Sequence[str] = ()
    rows: Sequence[Document] = ()

    def print(self, style: Format = "table", *, wide: bool = False) -> None:
        """Print the screen to stdout."""
        if style == "csv":
            from fp8tune.output.documents import print_csv

            print_csv(self.rows)
        elif style == "markdown":
            table = markdown_lines(fit(self.columns, wide=wide))
            lines = [[_markdown(line) for line in part if line] for part in (self.above, self.below)]
            parts = ("\n".join(part) for part in (lines[0], table, lines[1]))
            sys.stdout.write("\n\n".join(filter(None, parts)) + "\n")
        else:
            out = console()
            print_lines(out, self.above)
            for line in text_lines(fit(self.columns, out.width, wide=wide)):
                out.print(line, soft_wrap=True)
            print_lines(out, self.below)


def print_document(document: Document, screens: Iterable[Screen], style: Format, *, wide: bool = False) -> None:
    """Print a document as JSON, or its screens with an empty line between them."""
    if style == "json":
        from fp8tune.output.documents import plain

        print(json.dumps(plain(document), indent=2))
        return
    for place, screen in enumerate(screens):
        if place:
            print()
        screen.print(style, wide=wide)


def text_lines(columns: Sequence[Column]) -> list[Text]:
    """Return a table as lines for a terminal: no borders, two blanks between columns."""
    lines = []
    widths = [column.width for column in columns]
    for row in range(-1, max((len(column.cells) for column in columns), default=-1)):
        line = Text()
        for column, width in zip(columns, widths, strict=True):
            text = visible(column.heading if row < 0 else column.cells[row])
            blanks = " " * (width - cell_len(text))
            cell = blanks + text if column.align == "right" else text + blanks
            line.append("  " if line else "")
            line.append(cell, column.styles[row] if row >= 0 and column.styles else "")
        line.rstrip()
        lines.append(line)
    return lines


def markdown_lines(columns: Sequence[Column]) -> list[str]:
    """Return a table as GitHub Markdown, uncut."""
    if not columns:
        return []
    rules = ["---:" if column.align == "right" else "---" for column in columns]
    rows = [[_markdown(column.heading) for column in columns], rules]
    rows += [[_markdown(column.cells[row]) for column in columns] for row in range(len(columns[0].cells))]
    return [f"| {' | '.join(row)} |" for row in rows]


def _markdown(text: str) -> str:
    """Escape what Markdown would interpret: names come from databases, and a browser must not run them."""
    text = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]~]|\b_|_\b)", r"\\\1", text)


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """Print lines of text, broken between words at the console's width. Empty lines are left out."""
    for line in filter(None, lines):
        out.print(Text("\n".join(_wrapped(line, out.width))), soft_wrap=True)


def _wrapped(line: str, width: int) -> list[str]:
    return wrap(visible(line), width, break_long_words=False, break_on_hyphens=False)


def console(stream: Literal["stdout", "stderr"] = "stdout") -> Console:
    """Return a console: as wide as ``COLUMNS``, else the terminal, else unlimited; plain with ``NO_COLOR``."""
    file = getattr(sys, stream) or io.StringIO()  # None if the shell closed it
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else None if file.isatty() else UNLIMITED
    # no_color of Rich would leave bold text bold.
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return _Console(file=file, width=width, color_system=colors, highlight=False, markup=False, emoji=False)


class _Console(Console):
    """A console that leaves closed pipes to the caller; Rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def notice(*lines: str) -> None:
    """Print messages to stderr: one line each, broken between words in a terminal, without passwords."""
    for line in lines:
        text = visible(redacted(line))
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[: LONGEST_MESSAGE - 1]}…"
        # By print: a console of Rich would write over a progress bar that another console shows.
        width = console("stderr").width if sys.stderr.isatty() else UNLIMITED
        print("\n".join(_wrapped(text, width)), file=sys.stderr)


def warning(lines: Iterable[str]) -> None:
    """Print warnings to stderr, a few of each kind."""
    notice(*(f"fp8tune: warning: {line}" for line in notices(lines)))


def notices(lines: Iterable[str], most: int = 3) -> list[str]:
    """Return at most a few lines of each kind and the number of the others, so that 180 files are no 180 messages.

    Lines are of one kind if they differ only in numbers and in what is before the first colon.
    """
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(re.sub(r"\d+", "0", line.partition(": ")[2] or line), []).append(line)
    result = []
    for group in kinds.values():
        result += group[:most]
        result += [f"({len(group) - most} more like this)"] if len(group) > most else []
    return result
