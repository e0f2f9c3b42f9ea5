"""The table of best configs: an axis a column, what rows share in the title, the next best in words."""

from __future__ import annotations

import pytest
from database_rows import config, evidence, problem, studies_of

from fp8tune.render.winners import print_winners


def printed(capsys: pytest.CaptureFixture[str], *shapes: int) -> list[str]:
    rows = [
        evidence(times_us, config=config(block), of=problem(K=K))
        for K in shapes
        for block, times_us in ((64, 10.0), (128, 11.0))
    ]
    print_winners(studies_of(rows), "table")
    return capsys.readouterr().out.splitlines()


def test_one_row_has_all_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    title, header, row, *_ = printed(capsys, 2048)
    assert "jagged" not in title
    assert dict(zip(header.split(), row.split(), strict=False))["BLOCK_SIZE"] == "64"
    assert header.endswith("  from")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("exact-inputs", "checked for equal bytes on inputs whose sums are exact"),
        ("tolerance 1e-03 relative of float64", "checked within 1e-03 relative of float64"),
        ("exact to the first config", "checked for equal bytes against the first config"),
    ],
)
def test_the_title_says_what_was_checked_and_what_bounds(
    capsys: pytest.CaptureFixture[str], check: str, words: str
) -> None:
    known = {"flops": 10**9, "peak_flop_per_s": 1e15, "check": check}
    rows = [evidence(10.0, of=problem(K=K), **known) for K in (2048, 5120)]
    print_winners(studies_of(rows), "table")
    title, header, *_ = capsys.readouterr().out.splitlines()
    assert f"bound by compute, {words}, " in title
    assert "check" not in header


def test_what_rows_share_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    title, header, *rows = printed(capsys, 2048, 5120)
    assert "routing jagged" in title
    assert "BLOCK_SIZE 64" in title
    assert "routing" not in header
    assert [row.split()[header.split().index("K")] for row in rows if row] == ["2048", "5120"]
