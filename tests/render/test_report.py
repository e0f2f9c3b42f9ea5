"""Tables: which columns stand together in a terminal of some width, markdown, HTML, and one line a row in a pipe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.render.report import GAP, Report, blocks, left, right

words = st.text("abc ", min_size=1, max_size=12).filter(str.strip)
REPORT = Report("title", [left("name", str), right("us", lambda row: f"{len(row)}")], ["a|b", "<i>\n"])


@given(st.lists(words, min_size=2, max_size=12), st.integers(1, 60), st.integers(1, 2))
def test_every_column_stands_in_one_block_behind_the_names(headers: list[str], width: int, names: int) -> None:
    rows = [["x" * i for i in range(len(headers))]]
    found = blocks(headers, rows, width, names)
    assert all(block[:names] == list(range(names)) for block in found)
    assert [i for block in found for i in block[names:]] == list(range(names, len(headers)))
    for block in found:
        widths = [max(len(rows[0][i]), *map(len, headers[i].split())) for i in block]
        assert sum(widths) + GAP * (len(widths) - 1) <= width or len(block) <= names + 1


def test_what_fits_is_one_block() -> None:
    assert blocks(["a b", "cc"], [["1", "22"]], 5, 1) == [[0, 1]]


def test_markdown_keeps_a_bar_in_its_cell_and_a_row_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    REPORT.print("markdown")
    assert capsys.readouterr().out == "title\n\n| name | us |\n| --- | ---: |\n| a\\|b | 3 |\n| &lt;i>\\n | 4 |\n"


def test_html_shows_what_would_be_an_element() -> None:
    assert REPORT.html(len_class).splitlines() == [
        "<table>",
        '<tr class=""><th class="left">name</th><th class="right">us</th></tr>',
        '<tr class="three"><td class="left">a|b</td><td class="right">3</td></tr>',
        '<tr class="four"><td class="left">&lt;i&gt;\\n</td><td class="right">4</td></tr>',
        "</table>",
    ]


def len_class(row: str) -> str:
    return {3: "three", 4: "four"}[len(row)]


def test_a_pipe_gets_aligned_lines(capsys: pytest.CaptureFixture[str]) -> None:
    REPORT.print()
    assert capsys.readouterr().out == "title\nname   us\na|b     3\n<i>\\n   4\n"
