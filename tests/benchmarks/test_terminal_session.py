"""The picture of a terminal shows what its commands print."""

from __future__ import annotations

import html
import re

from benchmarks import printed, terminal_session

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
    assert "simulated clock: no kernel runs, times are drawn from a seeded model" in found
    assert [line for line in found if line.startswith("$")] == [f"$ {command}" for command in terminal_session.SESSION]


def test_lines_are_drawn_as_they_are() -> None:
    lines = ["$ a <b> & c", "  two  spaces", "quotes \" and '"]
    assert [line for line in drawn(terminal_session.svg(lines)) if line] == ["fp8tune", *lines]


def test_the_session_runs_where_no_row_of_the_user_is() -> None:
    assert all("results.db" not in command for command in terminal_session.SESSION)
    assert printed.WIDTH == terminal_session.WIDTH
