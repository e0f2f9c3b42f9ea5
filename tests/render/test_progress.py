"""The progress display: a plain line now and then in a pipe; on a terminal two lines that fit at any width."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked, told_to_end
from places import PLANTED
from rich.cells import cell_len
from rich.console import Console

from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.render.progress import Display, SweepProgress
from fp8tune.stats.decide import MeasuringPlan
from fp8tune.sweeping import events

PROBLEM = Problem("colwise", NamedInts(M=16640, K=5120, E=16))
CONFIG = NamedInts(BLOCK_SIZE=128, BLOCK_SIZE_ITER=512, LEAD=192, num_warps=8, num_stages=2, maxnreg=168)
DEVICE = Device(arch="sm_90", name="a GPU")


def lines(screen: io.StringIO) -> list[str]:
    """What a terminal shows of each line that was drawn."""
    return [re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", line) for line in re.split(r"\r?\n|\r", screen.getvalue())]


@pytest.mark.parametrize("width", [80, 100, 140, 180])
def test_both_lines_fit_however_long_the_text_is(width: int) -> None:
    screen, now = io.StringIO(), 0.0
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with Display(lambda: now, console, ticks=False) as display:
        config = " ".join(f"AXIS{n}=128" for n in range(40))
        for done in (0, 7_123):
            now += 42.0
            detail = "best 7.26 us  colwise M=16640"
            display.update("confirmation 2 of at most 4", done, 28_000, detail=detail, config=config)
    first = next(line for line in lines(screen) if "7,123" in line)
    second = next(line for line in reversed(lines(screen)) if "7.26" in line)
    for part in ("confirmation 2 of at most 4", "━", "7,123/28,000", "1:24", "ETA 2 min"):
        assert part in first
    assert second.startswith("best 7.26 us  colwise M=16640  … AXIS")
    assert second.endswith("AXIS39=128")
    assert max(map(cell_len, lines(screen))) <= width - 3  # ^C has room


def test_a_pipe_gets_a_line_every_ten_seconds_and_none_before(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with Display(clock=lambda: now, ticks=False) as display:
        display.update("rows", 0, 100)
        for done in range(1, 26):
            now += 1.0
            display.update("rows", done, 100)
    assert capsys.readouterr().err.splitlines() == ["rows: 10/100, 0:10, ETA 90 s", "rows: 20/100, 0:20, ETA 80 s"]


def done(stage: str = "screen", round: int = 0, process: str = "screen", time_us: float = 7.0) -> events.TrialDone:
    outcome = Outcome(Status.OK, time_us)
    row = Row(PROBLEM, CONFIG, DEVICE, Kind.MEASURED, outcome, stage=stage, round=round, process=process)
    return events.TrialDone(row, from_database=False)


def a_sweep() -> Iterator[tuple[float, events.Event]]:
    """Yield (seconds since the event before, event): two problem sizes, the second of them from the database."""
    yield 0, events.Started(DEVICE, Kind.MEASURED, 2, 8)
    yield 0, events.RoundStarted(PROBLEM, 0, 0, 2, 4)
    for time_us in (9.0, 8.0, 7.0, 10.0):
        yield 3, done(time_us=time_us)
    yield 0, events.RoundStarted(PROBLEM, 0, 1, 2, 2)
    yield 10, done(round=1)
    yield 2, done(round=1)
    yield 0, events.ConfirmationStarted(1, 6, 6, MeasuringPlan(), False, 1, 2)
    yield 0, done("final", process="final 00")
    yield 12, done("final", process="final 00")
    yield 0, events.Finished(8, 36.0)


def test_a_sweep_names_its_phase_and_the_time_that_it_still_takes(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with SweepProgress(clock=lambda: now, ticks=False) as progress:
        for seconds, event in a_sweep():
            now += seconds
            progress.show(event)
    said = capsys.readouterr().err.splitlines()
    best = f"best 7.00 us  colwise M=16640 K=5120 E=16 {CONFIG}"
    # 12 of 4 x 12 s: a problem size of two has two rounds; then 2 of 6 blocks
    assert said == [
        f"coarse pass: size 1/2, 0:12, ETA 36 s, {best}",
        f"coarse pass: size 1/2, 0:22, ETA 37 s, {best}",
        f"confirmation 1 of at most 2: 2/6, 0:36, ETA 24 s, {best}",
        "8 trials in 36.0 s",
    ]
    assert progress.stored == 8


SWEEP = ("sweep", "--kernel", f"{PLANTED / 'faults.py'}:SPEC", "--shapes", "tiny", "--timer", "simulated:5")


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_sweep_that_is_stopped_says_what_is_stored_and_how_to_go_on(
    number: int, code: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "results.db"
    arguments = [*SWEEP, "--grid", "num_warps=1,2,4,8,16,32", "--db", str(path)]
    ended, output = Forked(told_to_end(number, *arguments)).wait()
    assert ended == code, output
    last = output.splitlines()[-1]
    assert said in last
    assert f"of this run are stored in {path}, the last while " in last
    assert last.endswith(f"; go on with: fp8tune {' '.join(arguments)}")
