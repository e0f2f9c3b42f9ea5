"""Markdown of texts and tables. Raises UndocumentedError for an empty meaning: a page has no gaps."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_CODE = re.compile(r"``(.+?)``")


class UndocumentedError(ValueError):
    """Something in the code has no text that says what it is."""


def prose(text: str) -> str:
    """A docstring's text: its roles and code as Markdown, its lines joined."""
    named = _ROLE.sub(lambda found: f"`{found.group(1).removeprefix('fp8tune.').rpartition(':')[2]}`", text)
    return " ".join(_CODE.sub(r"`\1`", named).split())


def sentence(text: str) -> str:
    """It with a capital and a full stop."""
    text = prose(text)
    return text if not text else text[0].upper() + text[1:] + ("" if text[-1] in ".!?:" else ".")


def needed(text: str, of: str) -> str:
    """The text, which must be there. Raises UndocumentedError."""
    if not text.strip():
        raise UndocumentedError(f"{of} has no text that says what it is: write its docstring or meaning")
    return text


def code(text: object) -> str:
    """Text as code; nothing for nothing."""
    return f"`{text}`" if str(text) else ""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, a line a row."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def sections(*parts: str) -> str:
    """Parts with a blank line between; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)
