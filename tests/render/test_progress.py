"""The progress display: lines in a pipe; on a terminal a bar that stays whole at any width."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from fp8tune.render.progress import Display, duration


@pytest.mark.parametrize("width", [80, 120, 180])
def test_the_bar_the_count_and_the_eta_stay_however_long_the_text_is(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with Display(console=console) as display:
        display.update("colwise M=16640 K=5120 " + "x" * 300, 7, 40, 125.0)
    last = [line for line in screen.getvalue().splitlines() if "7/40" in line][-1]
    for part in ("━", "7/40", "ETA 2 min", "colwise", "…"):
        assert part in last
    assert cell_len(last.split("\x1b[2K")[-1]) <= width


def test_a_pipe_gets_a_line_a_phase_and_now_and_then_one(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with Display(clock=lambda: now) as display:
        for done in range(1, 26):
            now += 1.0
            display.update("rows", done, 100)
    assert capsys.readouterr().err.splitlines() == ["[11/100] rows", "[22/100] rows"]


def test_durations() -> None:
    assert (duration(90.4), duration(150.0)) == ("90 s", "2 min")
