"""Tables at any width, in Markdown and with colours; messages."""

from __future__ import annotations

import io
import sys

import pytest
from rich.cells import cell_len

from fp8tune.output.tables import Column, Screen, fit, notice, notices, number, text_lines
from fp8tune.output.text import config_texts

NAME = "package.module:softmax"
COLUMNS = [
    Column("kernel", [NAME], loses="start"),
    Column("config", ["64x128x256 B8 D1 w4 s3"], loses="end"),
    number("% peak", ["60"], loses="all"),
    Column("verdict", ["open"]),
]


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (63, [NAME, "64x128x256 B8 D1 w4 s3", "60", "open"]),
        (55, [NAME, "64x128x256 B8 D1 w4 s3", "open"]),
        (45, [NAME, "64x128x256 …", "open"]),
        (29, ["…e:softmax", "64x128x…", "open"]),
    ],
)
def test_a_narrow_table_loses_the_share_then_the_ends_of_cells_then_the_starts_of_names(
    width: int, cells: list[str]
) -> None:
    table = fit(COLUMNS, width=width)
    assert [texts[1] for _, texts in table] == cells
    assert max(cell_len(line) for line in text_lines(table)) <= width


def test_wide_columns_come_only_when_asked_for_and_columns_without_cells_never() -> None:
    columns = [*COLUMNS, number("GB/s", ["12"], wide=True), Column("gpu", [])]
    assert "GB/s" not in [column.heading for column, _ in fit(columns, width=200)]
    assert [column.heading for column, _ in fit(columns, width=20, wide=True)][-1] == "GB/s"


@pytest.mark.parametrize(("columns", "is_cut"), [("", False), ("30", True)])
def test_a_pipe_cuts_nothing_unless_columns_is_set(
    columns: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    Screen(["a title of several words that is wider than thirty"], COLUMNS).print()
    out = capsys.readouterr().out
    assert ("…" in out) is is_cut
    assert (max(map(len, out.splitlines())) <= 30) is is_cut


@pytest.mark.parametrize(("no_color", "is_styled"), [("", True), ("1", False)])
def test_a_terminal_has_colours_and_bold_text_unless_no_color_is_set(
    no_color: str, is_styled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"NO_COLOR": no_color, "TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    Screen([], [number("speedup", ["1.31x"]), Column("verdict", ["open"])]).print()
    assert ("\x1b[1m" in terminal.getvalue(), "\x1b[33m" in terminal.getvalue()) == (is_styled, is_styled)


def test_names_of_a_database_are_neither_html_nor_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    """They were raw HTML in the comment on a pull request."""
    hostile = "<img src=x onerror=alert(1)>|`*[a](b)\x1b[1m\nx"
    Screen([hostile], [Column("kernel", [hostile])], [hostile]).print("markdown")
    out = capsys.readouterr().out
    assert not set("<>\x1b") & set(out.replace("&lt;", "").replace("&gt;", ""))
    row = next(line for line in out.splitlines() if line.startswith("| &lt;"))
    assert row.count("|") - row.count("\\|") == 2
    for character in "`*[]|":
        assert out.count(character) - out.count(f"\\{character}") in (0, 6)  # 6: the table's own bars


def test_messages_are_one_line_of_at_most_300_characters_without_passwords(capsys: pytest.CaptureFixture[str]) -> None:
    notice("word " * 200, "cannot open postgresql://me:secret@host/db\nagain")
    lines = capsys.readouterr().err.splitlines()
    assert [len(line) <= 300 for line in lines] == [True, True]
    assert "secret" not in lines[1]


def test_messages_break_between_words_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a message of many words " * 10
    for stream, is_wrapped in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("COLUMNS", "40")
        notice(text.strip())
        lines = stream.getvalue().splitlines()
        assert (len(lines) > 1) is is_wrapped
        assert " ".join(lines).split() == text.split()


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
