"""Progress: a bar in a terminal, lines elsewhere, and no error that reaches the sweep."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator

import pytest
from rich.cells import cell_len
from rich.console import Console

from fp8tune.output import progress as displays
from fp8tune.output.progress import Display, SweepProgress
from fp8tune.output.tables import notice
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.sweeping import events

PROBLEM = Problem("colwise", NamedInts(M=16640, K=5120, E=16))
TODAY, BEST, OTHER = NamedInts(num_warps=4), NamedInts(num_warps=8), NamedInts(num_warps=2)
DEVICE = Device(arch="sm_90", name="a GPU")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Broken(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError("no space left on device")


def console(stream: io.StringIO, width: int = 80) -> Console:
    return Console(file=stream, force_terminal=True, width=width, color_system=None)


def a_sweep(*, stored: bool = False) -> Iterator[events.Event]:
    """Yield the events when one size is swept, all from the database or all new."""

    def timed(config: NamedInts, time_us: float, stage: str) -> events.TrialDone:
        row = Row(PROBLEM, config, DEVICE, Kind.MEASURED, Outcome(Status.OK, time_us), stage=stage)
        return events.TrialDone(row, from_database=stored)

    yield events.Started(DEVICE, Kind.MEASURED, 1, 3)
    yield events.RoundStarted(PROBLEM, 0, 0, 1, 3)
    yield timed(TODAY, 12.0, "screen")
    yield timed(BEST, 8.0, "screen")
    yield timed(OTHER, 9.0, "screen")  # not confirmed: stages are not compared
    yield events.ConfirmationStarted(1, 6, 4, 1)
    yield timed(TODAY, 11.0, "final")
    yield timed(BEST, 10.0, "final")
    yield events.Finished(4, 36.0)


@pytest.mark.parametrize("stored", [True, False])
def test_a_sweep_goes_on_in_a_terminal_of_which_nothing_can_be_written(stored: bool) -> None:
    """An error of the display ended the sweep: three times of three when a sweep was resumed in a terminal."""
    with SweepProgress({PROBLEM: TODAY}, console(Broken()), Clock()) as progress:  # the clock stands still
        for event in a_sweep(stored=stored):
            progress.show(event)
    assert progress.stored == (0 if stored else 5)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_error_of_the_display_is_one_warning(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with SweepProgress(out=Console(file=io.StringIO(), force_terminal=is_terminal, width=80)) as progress:
        monkeypatch.setattr(progress, "_add", lambda row: 1 / 0)
        for event in a_sweep():
            progress.show(event)
    assert capsys.readouterr().err.count("the progress display failed (ZeroDivisionError)") == 1


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_fits_the_terminal_and_vanishes(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "REFRESH_S", 60.0)
    stream, clock = io.StringIO(), Clock()
    with SweepProgress({PROBLEM: TODAY}, console(stream, width), clock) as progress:
        for event in list(a_sweep())[:-1]:
            clock.now += 10.0
            progress.show(event)
            progress._draw()
    lines = [re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", line) for line in re.split(r"\r?\n|\r", stream.getvalue())]
    assert max(map(cell_len, lines)) <= width
    for words in (("confirmation", "50 %", "20 s left"), ("1.50x over", "8.000 us"), ("1.10x over", "10.00 us")):
        assert any(all(word in line for word in words) for line in lines), words
    assert lines[-1] == ""


def test_a_message_is_printed_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was printed below, where the next frame of the bar erased it."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Display() as display:
        display.update("files", 0.5)
        display._draw()
        notice("a message")
    assert "\x1b[2Ka message" in terminal.getvalue()


def test_a_pipe_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Display(now=clock) as display:
        for done in (0.0, 0.25):
            display.update("files", done, count="of one folder")
            clock.now += 3.0
            display._draw()
        display.update("working", count="3 results")  # how much is left is not known
        display._draw()
    lines = ["files  of one folder  0 %", "files  of one folder  25 %  18 s left", "working  3 results"]
    assert capsys.readouterr().err.splitlines() == lines


def test_no_more_time_is_left_than_the_budget_has(capsys: pytest.CaptureFixture[str]) -> None:
    """A search of two minutes, which tries few configs of a large grid, said that hours were left."""
    clock = Clock()
    with Display(now=clock, budget_s=120.0) as display:
        for now, done in ((0.0, 0.0), (30.0, 0.001), (130.0, 0.01)):
            clock.now = now
            display.update("coarse pass", done)
            display._draw()
    lines = ["0 %  2 min 0 s left", "25 %  1 min 30 s left", "100 %  0 s left"]
    assert capsys.readouterr().err.splitlines() == [f"coarse pass  {line}" for line in lines]


def test_sizes_of_several_gpus_are_counted_together(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [Problem("colwise", NamedInts(K=k)) for k in (1, 2, 3, 4)]
    clock = Clock()

    def timed(problem: Problem, stage: str) -> events.TrialDone:
        row = Row(problem, TODAY, DEVICE, Kind.MEASURED, Outcome(Status.OK, 10.0), stage=stage)
        return events.TrialDone(row, from_database=False)

    def coarse(*problems: Problem) -> Iterator[events.Event]:
        yield from (events.RoundStarted(problem, 0, 0, 1, 2) for problem in problems)
        yield from (timed(problem, "screen") for problem in problems)

    steps: list[list[events.Event]] = [
        [events.Started(DEVICE, Kind.MEASURED, 4, 8), *coarse(*sizes[:3])],  # on three GPUs, half of a size on each
        [timed(sizes[0], "screen"), events.ConfirmationStarted(1, 6, 2, 1), timed(sizes[0], "final")],
        [timed(sizes[1], "screen"), timed(sizes[2], "screen"), *coarse(sizes[3]), timed(sizes[3], "screen")],
        [
            events.ConfirmationStarted(3, 6, 6, 1),
            timed(sizes[1], "final"),
            events.ChildDied("1", "was killed", 1, True),
        ],
    ]
    with SweepProgress(now=clock) as progress:
        for step in steps:
            for event in step:
                progress.show(event)
            progress._draw()
    phases = [line.partition(" %")[0] for line in capsys.readouterr().err.splitlines()]
    assert phases == [
        "coarse pass  0 of 4 sizes  38",
        "coarse pass  1 of 4 sizes  50",
        "confirmation  1 size  50",
        "GPU 1 starts again: its process was killed with 1 size, which wait again",
        "confirmation  4 sizes  25",
    ]
