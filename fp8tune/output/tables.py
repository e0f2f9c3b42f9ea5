"""The one table that a screen has, at any width, with the lines above and below it; messages."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fp8tune.output.documents import Document, plain, print_csv
from fp8tune.redaction import redacted
from fp8tune.text import visible

Format = Literal["table", "markdown", "json", "csv"]

STYLES = dict.fromkeys(("open", "quick", "stale", "OPEN"), "yellow") | dict.fromkeys(
    ("wrong", "REGRESSION", "WRONG", "failed", "lost"), "red"
)
"""Colours of verdicts and states. Speedups are bold."""

UNLIMITED = 100_000  # width of what is not a terminal: nothing is cut there
SHORTEST = 8  # characters that a cut cell keeps
LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Column:
    """A column, and what may happen to it in a narrow terminal."""

    heading: str
    cells: Callable[[Any], str] | Sequence[str]
    """Text of a row's cell, or finished cells. A column without any text is left out."""
    align: Literal["left", "right"] = "left"
    cut: Literal["", "start", "end"] = ""
    """The side that an ellipsis replaces if the table is too wide. Names keep their end, so theirs is the start."""
    leaves: Literal["", "before cuts", "after cuts"] = ""
    """When the column is left out of a table that is too wide."""
    wide: bool = False
    """True for columns of ``--wide`` alone."""

    def texts(self, rows: Iterable[Any]) -> list[str]:
        """Return the heading and the cells."""
        cells = map(self.cells, rows) if callable(self.cells) else self.cells
        return [visible(self.heading), *map(visible, cells)]


number = partial(Column, align="right")
"""A column of numbers."""


def fit(
    columns: Iterable[Column], rows: Sequence[Any] = (), width: int = UNLIMITED, *, wide: bool = False
) -> list[tuple[Column, list[str]]]:
    """Return the columns that a width has room for, with their headings and cells. ``wide`` keeps all.

    First columns that leave ``before cuts`` go, then cells are cut from the right, then names, then columns that leave
    ``after cuts`` go.
    """
    table = [(column, column.texts(rows)) for column in columns if wide or not column.wide]
    table = [(column, texts) for column, texts in table if any(texts[1:])]
    for step in () if wide else ("before cuts", "end", "start", "after cuts"):
        for place in reversed(range(len(table))):
            column, texts = table[place]
            excess = sum(_width(texts) + 2 for _, texts in table) - 2 - width
            room = max(SHORTEST, cell_len(texts[0]), _width(texts) - excess)
            if excess > 0 and step == column.leaves:
                del table[place]
            elif excess > 0 and step == column.cut:
                table[place] = column, [_shortened(text, room, step) for text in texts]
    return table


def _width(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts))


def _shortened(text: str, width: int, side: str) -> str:
    if cell_len(text) <= width:
        return text
    return f"…{text[-width + 1 :]}" if side == "start" else f"{text[: width - 1]}…"


@dataclass(frozen=True)
class Screen:
    """Lines and one table that a command prints. Empty lines are left out."""

    above: Sequence[str] = ()
    columns: Sequence[Column] = ()
    below: Sequence[str] = ()
    rows: Sequence[Any] = ()

    def print(self, style: Format = "table", *, wide: bool = False) -> None:
        """Print the screen to stdout."""
        if style == "markdown":
            table = markdown_lines(self.columns, self.rows, wide=wide)
            lines = [[_markdown(line) for line in part if line] for part in (self.above, self.below)]
            parts = ("\n".join(part) for part in (lines[0], table, lines[1]))
            sys.stdout.write("\n\n".join(filter(None, parts)) + "\n")
            return
        out = console()
        print_lines(out, self.above)
        for line in text_lines(fit(self.columns, self.rows, out.width, wide=wide)):
            out.print(line, soft_wrap=True)
        print_lines(out, self.below)


def print_document(document: Document, screens: Iterable[Screen], style: Format, *, wide: bool = False) -> None:
    """Print a document as JSON or CSV, or its screens with an empty line between them."""
    if style == "json":
        print(json.dumps(plain(document), indent=2))
    elif style == "csv":
        print_csv(document)
    else:
        for place, screen in enumerate(screens):
            if place:
                print()
            screen.print(style, wide=wide)


def text_lines(table: Sequence[tuple[Column, Sequence[str]]]) -> list[Text]:
    """Return a table as lines for a terminal: no borders, two blanks between columns."""
    lines = []
    for place, row in enumerate(zip(*(texts for _, texts in table), strict=True)):
        line = Text()
        for text, (column, texts) in zip(row, table, strict=True):
            blanks, style = " " * (_width(texts) - cell_len(text)), ""
            if place:
                is_speedup = column.align == "right" and text.endswith("x")
                style = "bold" if is_speedup else STYLES.get(text, "")
            line.append("  " if line else "")
            line.append(blanks + text if column.align == "right" else text + blanks, style)
        line.rstrip()
        lines.append(line)
    return lines


def markdown_lines(columns: Iterable[Column], rows: Sequence[Any] = (), *, wide: bool = False) -> list[str]:
    """Return a table as GitHub Markdown, uncut."""
    table = fit(columns, rows, wide=wide)
    lines = [f"| {' | '.join(map(_markdown, row))} |" for row in zip(*(texts for _, texts in table), strict=True)]
    rules = ("---:" if column.align == "right" else "---" for column, _ in table)
    return [*lines[:1], f"| {' | '.join(rules)} |", *lines[1:]] if lines else []


def _markdown(text: str) -> str:
    """Escape what Markdown would interpret: names come from databases, and a browser must not run them."""
    text = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]~]|\b_|_\b)", r"\\\1", text)


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """Print lines of text, broken between words at the console's width. Empty lines are left out."""
    for line in filter(None, lines):
        out.print(Text(wrapped(line, out.width)), soft_wrap=True)


def wrapped(text: str, width: int, indent: int = 0) -> str:
    """Return a text broken between words. Its first line starts after an indent, and the others below it."""
    lines = wrap(visible(text), max(20, width - indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines)


class _Console(Console):
    """A console that leaves closed pipes to the caller; Rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stream: Literal["stdout", "stderr"] = "stdout") -> Console:
    """Return a console: as wide as ``COLUMNS``, else the terminal, else unlimited; plain with ``NO_COLOR``."""
    file = getattr(sys, stream) or io.StringIO()  # None if the shell closed it
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else None if file.isatty() else UNLIMITED
    # no_color of Rich would leave bold text bold.
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return _Console(file=file, width=width, color_system=colors, highlight=False, markup=False, emoji=False)


def notice(*lines: str) -> None:
    """Print messages to stderr: one line each, broken between words in a terminal, without passwords."""
    for line in lines:
        text = visible(redacted(line))
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[: LONGEST_MESSAGE - 1]}…"
        # By print: a console of Rich would write over a progress bar that another console shows.
        width = console("stderr").width if sys.stderr.isatty() else UNLIMITED
        print(wrapped(text, width), file=sys.stderr)


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
