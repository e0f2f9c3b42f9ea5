"""Tables of many columns: in a terminal cut into blocks that fit, in a file or pipe one table, or markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from fp8tune.render.terminal import table, visible

Columns = list[tuple[str, str]]
"""(header, ``left`` or ``right``)."""

GAP = 2
"""Blanks between two columns."""


def print_wide(title: str, columns: Columns, rows: Sequence[Sequence[str]], output_format: str, names: int = 1) -> None:
    """A ``table`` or ``markdown``. The first ``names`` columns name a row, and stand in every block of a table."""
    if output_format == "markdown":
        _print_markdown(title, columns, rows)
    elif not sys.stdout.isatty():
        table(title, columns, rows)
        print()
    else:
        headed = [("\n".join(_words(header)), side) for header, side in columns]
        for number, block in enumerate(blocks(columns, rows, Console().width, names)):
            said = f"{title}, continued" if number else title
            table(said, [headed[i] for i in block], [[row[i] for i in block] for row in rows])
            print()


def blocks(columns: Columns, rows: Sequence[Sequence[str]], width: int, names: int) -> list[list[int]]:
    """The columns of each block, as many as fit; headers break at blanks and underscores, cells do not."""
    widths = [max(map(len, (*_words(header), *(row[i] for row in rows)))) for i, (header, _) in enumerate(columns)]
    found = [list(range(names))]
    for i in range(names, len(columns)):
        fits = sum(widths[j] + GAP for j in (*found[-1], i)) - GAP <= width
        if not fits and len(found[-1]) > names:
            found.append(list(range(names)))
        found[-1].append(i)
    return found


def _words(header: str) -> list[str]:
    return header.replace("_", " ").split()


def _print_markdown(title: str, columns: Columns, rows: Sequence[Sequence[str]]) -> None:
    rules = ["---:" if side == "right" else "---" for _, side in columns]
    print(f"{visible(title)}\n")
    for line in ([name for name, _ in columns], rules, *rows):
        print(f"| {' | '.join(_markdown_cell(cell) for cell in line)} |")
    print()


def _markdown_cell(text: str) -> str:
    return visible(text).replace("|", "\\|")
