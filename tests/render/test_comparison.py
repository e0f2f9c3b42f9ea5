"""A comparison as people see it: table, markdown, HTML, and the progress of a live one."""

from __future__ import annotations

import html
from dataclasses import replace

import pytest

from fp8tune.comparing.comparison import ComparedRow, Comparison, Revision
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.render import compare as render_compare
from fp8tune.stats.estimate import Estimate

H100 = Device("sm_90", "NVIDIA H100", "1" * 16, 132, "580.95", "cuda 13.0", "2.11.0", "3.6.0")
PROBLEM = Problem("colwise", NamedInts(M=16640, K=5120, G=64), routing="jagged")
TIMED = ComparedRow(
    "colwise",
    ChangeVerdict.IMPROVEMENT,
    PROBLEM,
    H100,
    before_us=1234.56,
    after_us=617.28,
    effect=Estimate(-0.6931471805599453, 0.001, 11),
    control=Estimate(0.0004, 0.001, 11),
    is_stable=True,
    n=12,
)


def comparison(*rows: ComparedRow) -> Comparison:
    return Comparison(Revision("main", "a" * 40), Revision("branch", "b" * 40), rows)


def test_markdown_is_a_table_and_one_line_of_provenance() -> None:
    assert render_compare.markdown(comparison(TIMED)).splitlines() == [
        "| Kernel | Shape | Before (us) | After (us) | Speedup | Change | 95 % interval | Detectable | Control "
        "| Verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        "| colwise | M=16640 K=5120 G=64, jagged | 1,234.6 | 617.3 | 2.00x | -50.00 % | -50.11 % to -49.89 % | +0.85 % "
        "| +0.04 % | IMPROVEMENT |",
        "",
        "NVIDIA H100 (sm_90), driver 580.95, cuda 13.0, torch 2.11.0, triton 3.6.0. "
        "Before: main (aaaaaaaaaaaa), after: branch (bbbbbbbbbbbb). Recorded rows, matched by kernel source. "
        "1 IMPROVEMENT; geometric mean of the change -50.00 %.",
    ]


@pytest.mark.parametrize("name", ["H100 | x |\n| --- |", "<script>alert(1)</script>", "\x1b[2J"])
def test_a_stored_name_cannot_break_out(name: str) -> None:
    told = comparison(replace(TIMED, device=replace(H100, name=name)))
    said = render_compare.markdown(told)
    assert len(said.splitlines()) == 5
    assert "\x1b" not in said
    assert "<script" not in said
    page = render_compare.page(told)
    assert "\x1b" not in page
    assert "<script" not in page
    if name.startswith("<"):
        assert html.escape(name) in page


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["CLEAR", "SAME-CODE", "IMPROVEMENT", "NEW", "REMOVED"], 0),
        (["CLEAR", "INCONCLUSIVE"], 3),
        (["CLEAR", "no rows"], 3),
        (["INCONCLUSIVE", "REGRESSION"], 1),
        (["INCONCLUSIVE", "NEWLY-WRONG"], 1),
        ([], 3),
    ],
)
def test_exit_codes(verdicts: list[str], code: int) -> None:
    assert comparison(*(replace(TIMED, verdict=ChangeVerdict(word)) for word in verdicts)).exit_code == code
