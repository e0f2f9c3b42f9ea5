"""The one table that a screen has, at any width, with the lines above and below it; messages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import Any, Literal, TextIO

from rich.cells import cell_len

from fp8tune.output.documents import Document, plain, print_csv
from fp8tune.redaction import redacted
from fp8tune.stats.means import group_by
from fp8tune.text import visible

Format = Literal["table", "markdown", "json", "csv"]

YELLOW, RED, GREEN, BOLD = "33", "31", "32", "1"  # codes of a terminal

STYLES = dict.fromkeys(("open", "quick", "stale", "OPEN", "warning"), YELLOW) | {"ok": GREEN}
STYLES |= dict.fromkeys(("wrong", "REGRESSION", "WRONG", "lost", "error"), RED)
"""Colours of verdicts, states and levels. Speedups are bold."""

UNLIMITED = 100_000  # width of what is not a terminal: nothing is cut there
SHORTEST = 8  # characters that a cut cell keeps
LONGEST_MESSAGE = 300
SIMILAR = 3  # messages of one kind that are printed


@dataclass(frozen=True)
class Column:
    """A column, and what may happen to it in a narrow terminal."""

    heading: str
    cells: Callable[[Any], str] | Sequence[str]
    """Text of a row's cell, or finished cells. A column without any text is left out."""
    align: Literal["left", "right"] = "left"
    loses: Literal["", "all", "end", "start"] = ""
    """The part that a table loses which is too wide: the column, or an end of its cells. Names keep their end."""
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

    First columns go that may, then cells are cut from the right, then names.
    """
    table = [(column, column.texts(rows)) for column in columns if wide or not column.wide]
    table = [(column, texts) for column, texts in table if any(texts[1:])]
    for step in () if wide else ("all", "end", "start"):
        for place in reversed(range(len(table))):
            column, texts = table[place]
            excess = sum(_width(texts) + 2 for _, texts in table) - 2 - width
            if excess <= 0 or column.loses != step:
                continue
            if step == "all":
                del table[place]
            else:
                room = max(SHORTEST, cell_len(texts[0]), _width(texts) - excess)
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
            above, below = ([_markdown(line) for line in lines if line] for lines in (self.above, self.below))
            table = "\n".join(markdown_lines(self.columns, self.rows, wide=wide))
            # Paragraphs: a job summary, unlike a comment, runs the lines of a paragraph together.
            print("\n\n".join(filter(None, (*above, table, *below))))
            return
        print_lines(self.above)
        for line in text_lines(fit(self.columns, self.rows, width_of(sys.stdout), wide=wide), is_styled=has_styles()):
            print(line)
        print_lines(self.below)


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


def text_lines(table: Sequence[tuple[Column, Sequence[str]]], *, is_styled: bool = False) -> list[str]:
    """Return a table as lines for a terminal: no borders, two blanks between columns."""
    lines = []
    for place, row in enumerate(zip(*(texts for _, texts in table), strict=True)):
        cells = []
        for text, (column, texts) in zip(row, table, strict=True):
            blanks, is_number = " " * (_width(texts) - cell_len(text)), column.align == "right"
            if place and is_styled:
                text = styled(text, BOLD if is_number and text.endswith("x") else STYLES.get(text, ""))
            cells.append(blanks + text if is_number else text + blanks)
        lines.append("  ".join(cells).rstrip())
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


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of text, broken between words at the width of stdout. Empty lines are left out."""
    for line in filter(None, lines):
        text = wrapped(line, width_of(sys.stdout))
        level, blanks, _ = text.partition("  ")
        print(styled(level, STYLES.get(level, "")) + text[len(level) :] if blanks and has_styles() else text)


def wrapped(text: str, width: int) -> str:
    """Return a text broken between words, below its first column if it has two: ``error    no GPU was found``."""
    text = visible(text)
    indent = len(text) - len(re.sub(r"^ *(\S+  +)?(-> )?", "", text))
    lines = wrap(text, max(20, width), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def width_of(stream: TextIO) -> int:
    """Return the width of a stream: ``COLUMNS``, else the terminal's, else unlimited."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    with contextlib.suppress(OSError):  # no terminal
        return os.get_terminal_size(stream.fileno()).columns or 80  # 0 where nobody has set it
    return UNLIMITED


def styled(text: str, style: str) -> str:
    """Return a text between a terminal's codes of a style; as it is without one."""
    return f"\x1b[{style}m{text}\x1b[0m" if style else text


def has_styles() -> bool:
    """Return True if stdout is a terminal, and colours are wanted."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def notice(*lines: str) -> None:
    """Print messages to stderr: one line each, broken between words in a terminal, without passwords."""
    for line in lines:
        text = visible(redacted(line))
        text = text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1]}…"
        print(wrapped(text, width_of(sys.stderr) if sys.stderr.isatty() else UNLIMITED), file=sys.stderr)


def warning(lines: Iterable[str]) -> None:
    """Print warnings to stderr, a few of each kind."""
    notice(*(f"fp8tune: warning: {line}" for line in notices(lines)))


def notices(lines: Iterable[str]) -> list[str]:
    """Return a few lines of each kind and the number of the others, so that 180 files are no 180 messages.

    Lines are of one kind if they differ only in numbers and in what is before the first colon.
    """
    result = []
    for kind in group_by(lines, lambda line: re.sub(r"\d+", "0", line.partition(": ")[2] or line)).values():
        result += kind[:SIMILAR]
        result += [f"({len(kind) - SIMILAR} more like this)"] if len(kind) > SIMILAR else []
    return result
