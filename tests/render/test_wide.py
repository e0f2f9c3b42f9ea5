"""Tables of many columns: which columns stand together in a terminal of some width, and markdown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.render.wide import GAP, blocks, print_wide

words = st.text("abc ", min_size=1, max_size=12).filter(str.strip)


@given(st.lists(words, min_size=2, max_size=12), st.integers(1, 60), st.integers(1, 2))
def test_every_column_stands_in_one_block_behind_the_names(headers: list[str], width: int, names: int) -> None:
    columns, rows = [(header, "left") for header in headers], [["x" * i for i in range(len(headers))]]
    found = blocks(columns, rows, width, names)
    assert all(block[:names] == list(range(names)) for block in found)
    assert [i for block in found for i in block[names:]] == list(range(names, len(headers)))
    for block in found:
        widths = [max(len(rows[0][i]), *map(len, headers[i].split())) for i in block]
        assert sum(widths) + GAP * (len(widths) - 1) <= width or len(block) <= names + 1


def test_what_fits_is_one_block() -> None:
    assert blocks([("a b", "left"), ("cc", "right")], [["1", "22"]], 5, 1) == [[0, 1]]


def test_markdown_keeps_a_bar_in_its_cell(capsys: pytest.CaptureFixture[str]) -> None:
    print_wide("title", [("name", "left"), ("us", "right")], [["a|b", "1"]], "markdown")
    assert capsys.readouterr().out == "title\n\n| name | us |\n| --- | ---: |\n| a\\|b | 1 |\n\n"
