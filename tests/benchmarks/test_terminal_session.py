"""The picture of a terminal shows what its commands print."""

from __future__ import annotations

import html
import re

from benchmarks import terminal_session

_TIMED = re.compile(r"\d (s|min)\b")


def drawn(svg: str) -> list[str]:
    """The lines of text of a picture."""
    texts = re.findall(r"<text [^>]*>(.*?)</text>", svg)
    return [html.unescape(text).replace("\xa0", " ").rstrip() for text in texts]


def test_the_picture_shows_what_the_commands_print() -> None:
    """Where it does not: python -m benchmarks.terminal_session"""
    lines = [line for line in terminal_session.lines() if line and not _TIMED.search(line)]
    assert max(map(len, lines)) <= terminal_session.WIDTH  # a longer line would be cut off
    found = drawn(terminal_session.TARGET.read_text(encoding="utf-8"))
    assert [line for line in lines if line not in found] == []
    assert terminal_session.TITLE in found
    assert [line for line in found if line.startswith("$")] == [f"$ {command}" for command in terminal_session.SESSION]
