"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> str:
    """Return a Markdown table, with all columns but the first aligned by a rule such as ``---:``."""
    lines = [headings, ["---", *[align] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
