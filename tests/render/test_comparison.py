"""A comparison as people see it: table, markdown, HTML, and the progress of a live one."""

from __future__ import annotations

import html
from dataclasses import replace

import pytest

from fp8tune.compare.comparison import ComparedRow, Comparison, Revision
from fp8tune.compare.rows import Step
from fp8tune.compare.verdicts import ChangeVerdict
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.render import compare as render_compare
from fp8tune.render import contracts
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


def test_markdown_has_one_table_a_device() -> None:
    other = replace(TIMED, device=replace(H100, name="NVIDIA H200", uuid_hash="2" * 16))
    text = render_compare.markdown(comparison(TIMED, other, ComparedRow("rowwise", ChangeVerdict.NEW)))
    assert text.count("| Kernel |") == 3
    assert text.count("2.00x") == 2


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


def test_disturbed_blocks_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    hot = replace(TIMED, blocks=36, ungated=2, throttled=5, slowdowns=("software thermal",))
    told = comparison(hot, replace(TIMED, blocks=36))
    (notice,) = told.notices
    assert notice == (
        "colwise M=16640 K=5120 G=64: 5 of 36 blocks were timed while the GPU was slowed down (software thermal)"
    )
    row, calm = map(contracts.compared, told.rows)
    names = ("blocks", "ungated_blocks", "throttled_blocks", "throttle_reasons")
    assert [row[name] for name in names] == [36, 2, 5, ["software thermal"]]
    assert [calm[name] for name in names] == [36, 0, 0, []]
    render_compare.print_comparison(told, "table")
    said = " ".join(capsys.readouterr().out.split())
    assert "5 of 72 blocks were timed while the GPU was slowed down; 2 of 72 blocks include the host's time" in said


def test_a_control_that_drifts_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    drifted = replace(TIMED, verdict=ChangeVerdict.CLEAR, control=Estimate(0.02, 0.001, 11), is_stable=False)
    told = replace(comparison(drifted), control=Estimate(0.02, 0.001, 11))
    assert told.exit_code == 3
    render_compare.print_comparison(told, "table")
    assert "+2.02 % (drifted)" in capsys.readouterr().out
    assert any("the control arm moved" in line for line in told.notices)


def test_progress_in_a_pipe_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with render_compare.CompareProgress(clock=lambda: now[0], ticks=False) as progress:
        progress.show(Step("reading colwise"))
        for done in range(1, 9):
            now[0] += 4.0
            progress.show(Step("timing", done, 8, 4.0 * (8 - done)))
    assert capsys.readouterr().err.splitlines() == ["timing: 3/8, 0:12, ETA 20 s", "timing: 6/8, 0:24, ETA 8 s"]


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
