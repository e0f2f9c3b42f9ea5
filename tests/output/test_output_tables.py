"""Tables at any width, in Markdown and with colours; messages; names of axes."""

from __future__ import annotations

import io
import sys

import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len

from fp8tune.output.tables import Column, Screen, fit, notice, notices, number, text_lines
from fp8tune.output.text import config_texts

NAME, CONFIG = "package.module:softmax", "64x128x256 B8 D1 w4 s3"
COLUMNS = [
    Column("kernel", [NAME], loses="start"),
    Column("config", [CONFIG], loses="end"),
    number("% peak", ["60"], loses="all"),
    Column("verdict", ["open"]),
    number("GB/s", ["12"], wide=True),
    Column("gpu", [""]),
]
HOSTILE = "<img src=x onerror=alert(1)>|`*[a](b)\x1b[1m\nx"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "wide", "cells"),
    [
        (63, False, [NAME, CONFIG, "60", "open"]),
        (55, False, [NAME, CONFIG, "open"]),
        (45, False, [NAME, "64x128x256 …", "open"]),
        (29, False, ["…e:softmax", "64x128x…", "open"]),
        (29, True, [NAME, CONFIG, "60", "open", "12"]),
    ],
)
def test_a_narrow_table_loses_columns_then_ends_of_cells_then_starts_of_names(
    width: int, wide: bool, cells: list[str]
) -> None:
    table = fit(COLUMNS, width=width, wide=wide)
    assert [texts[1] for _, texts in table] == cells
    assert wide or max(map(cell_len, text_lines(table))) <= width


@pytest.mark.parametrize("columns", ["", "30"])
def test_a_pipe_cuts_nothing_unless_columns_is_set(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    Screen(["a title of several words that is wider than thirty"], COLUMNS).print()
    out = capsys.readouterr().out
    assert ("…" in out, max(map(len, out.splitlines())) <= 30) == (bool(columns), bool(columns))


@pytest.mark.parametrize(("no_color", "is_styled"), [("", True), ("1", False)])
def test_a_terminal_has_styles_unless_no_color_is_set(
    no_color: str, is_styled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    for name, value in {"NO_COLOR": no_color, "TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    Screen([], [number("speedup", ["1.31x"]), Column("verdict", ["open"])]).print()
    assert ("\x1b[1m" in terminal.getvalue(), "\x1b[33m" in terminal.getvalue()) == (is_styled, is_styled)


def test_names_of_a_database_are_neither_html_nor_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    """They were raw HTML in the comment on a pull request."""
    Screen([HOSTILE], [Column("kernel", [HOSTILE])], [HOSTILE]).print("markdown")
    out = capsys.readouterr().out
    assert not set("<>\x1b") & set(out.replace("&lt;", "").replace("&gt;", ""))
    for character in "`*[]|":
        assert out.count(character) - out.count(f"\\{character}") == (6 if character == "|" else 0)  # the table's bars


def test_markdown_keeps_lines_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison's last two lines ran together in the Action's job summary."""
    above, below = ["title", "", "subtitle"], ["", "A: main, B: branch", "Control: stable"]
    Screen(above, [Column("kernel", ["softmax"])], below).print("markdown")
    tokens = MarkdownIt("commonmark").enable("table").parse(capsys.readouterr().out)
    texts = [token.content for token in tokens if token.type == "inline"]
    assert texts == ["title", "subtitle", "kernel", "softmax", "A: main, B: branch", "Control: stable"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_messages_are_short_lines_without_passwords_which_a_terminal_breaks_between_words(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal() if is_terminal else io.StringIO())
    monkeypatch.setenv("COLUMNS", "40")
    notice("word " * 200, "cannot open postgresql://me:secret@host/db\nagain")
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= (50 if is_terminal else 300)
    assert is_terminal or len(lines) == 2
    assert "secret" not in stream.getvalue()
    assert {*stream.getvalue().split()[:50]} == {"word"}


def test_many_messages_of_one_kind_become_a_few() -> None:
    lines = [f"file_{n}.json: {n} configs left out" for n in range(180)]
    assert notices([*lines, "other: reason"]) == [*lines[:3], "(177 more like this)", "other: reason"]


def test_axes_have_the_shortest_unique_initials() -> None:
    first = {"BLOCK_M": 64, "BLOCK_N": 128, "SPLIT": 2, "SPLIT_K": 1, "warp": 1, "num_warps": 4, "num_stages": 3}
    second = {**first, "BLOCK_M": 32, "SPLIT": 4, "SPLIT_K": 2, "warp": 2, "num_warps": 8}
    texts, legend = config_texts([first, second])
    assert texts[0] == "64x128 SPLIT=2 SPLIT_1 wa1 w4"  # SPLIT begins SPLIT_K, and w is num_warps
    assert legend == "config: BLOCK_M x BLOCK_N, SPLIT_ SPLIT_K, wa warp, w num_warps; all num_stages=3"
    assert config_texts([{"TILE": 2}, {"TILE": 4}], spelled=True)[0] == ["TILE=2", "TILE=4"]
    assert config_texts([{"A1": 2, "A2": 4}, {"A1": 3, "A2": 5}, None])[0] == [
        "A1=2 A2=4",
        "A1=3 A2=5",
        "not published",
    ]
