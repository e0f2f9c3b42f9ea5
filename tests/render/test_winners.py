"""The table of best configs: an axis a column, what rows share in the title, the next best behind a slash."""

from __future__ import annotations

import pytest
from database_rows import config, evidence, problem

from fp8tune.choose.ranking import winners
from fp8tune.render.winners import print_winners


def printed(capsys: pytest.CaptureFixture[str], *shapes: int) -> list[str]:
    rows = [
        evidence(times_us, config=config(block), of=problem(K=K))
        for K in shapes
        for block, times_us in ((64, 10.0), (128, 11.0))
    ]
    print_winners(winners(rows), "table")
    return capsys.readouterr().out.splitlines()


def test_one_row_has_all_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    title, header, row, *_ = printed(capsys, 2048)
    assert "jagged" not in title
    assert dict(zip(header.split(), row.split(), strict=False))["BLOCK_SIZE"] == "64/128"


def test_what_rows_share_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    title, header, *rows = printed(capsys, 2048, 5120)
    assert "routing jagged" in title
    assert "BLOCK_SIZE 64/128" in title
    assert "routing" not in header
    assert [row.split()[header.split().index("K")] for row in rows if row] == ["2048", "5120"]
