"""The measured part of two runs: where it begins and ends, and when two runs can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.replay.program import Ended
from fp8tune.replay.watch import window
from fp8tune.replay.watch.window import Measured, Window, busy_ns
from fp8tune.tuning.runs import Run, change


def kernel() -> None:
    """Stand for the function of a kernel."""


class Tuner:
    """An autotuner whose first launch tunes for a second, as ``bench_time`` says."""

    def __init__(self) -> None:
        self.fn = kernel
        self.bench_time: float | None = None

    def run(self) -> None:
        self.bench_time = self.bench_time or 1.0


def launched(folder: Path, launches: int, plan: dict[str, Any] | None = None) -> Measured:
    """Return what a process measures that makes so many launches."""
    measuring = Window(folder, plan, "")
    run, tuner = measuring.counted(Tuner.run), Tuner()
    for _ in range(launches):
        run(tuner)
    measuring.finish()
    (measured,) = Measured.read(folder)
    return measured


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "QUIET_S", 0.0)
    monkeypatch.delenv("RANK", raising=False)


def test_the_window_opens_when_tuning_is_over(tmp_path: Path) -> None:
    measured = launched(tmp_path, 100)
    assert (measured.opened, measured.closed, measured.launches) == (window.QUIET_LAUNCHES + 2, None, 100)
    assert measured.tuning_s == {"kernel": 1.0}


def test_a_short_program_has_no_window(tmp_path: Path) -> None:
    assert launched(tmp_path, window.QUIET_LAUNCHES).opened is None


def test_the_second_run_has_the_window_of_the_first(tmp_path: Path) -> None:
    measured = launched(tmp_path, 100, {"": [30, 60]})
    assert (measured.opened, measured.closed) == (30, 60)


def test_a_launch_within_a_launch_does_not_count(tmp_path: Path) -> None:
    measuring = Window(tmp_path, None, "")
    inner = measuring.counted(lambda self: None)
    outer = measuring.counted(lambda self: inner(self))
    outer(object())
    measuring.finish()
    assert Measured.read(tmp_path)[0].launches == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))))
def test_busy_time_counts_each_moment_once(spans: list[tuple[int, int]]) -> None:
    moments = {moment for start, length in spans for moment in range(start, start + length)}
    assert busy_ns([(start, start + length) for start, length in spans]) == len(moments)


def run(*processes: Measured) -> Run:
    return Run(Ended(0, None), processes)


def process(rank: str = "", opened: int | None = 30, closed: int | None = 60, **values: Any) -> Measured:
    return Measured(rank, opened, closed, 100, **values)


def test_changes_by_the_picks_are_told_from_others() -> None:
    before = run(process(gpu_us=1000.0, kernel_us={"a": 400.0, "b": 600.0}, tuning_s={"a": 5.0, "b": 1.0}))
    after = run(process(gpu_us=920.0, kernel_us={"a": 300.0, "b": 620.0}, tuning_s={"b": 1.0}, pinned=("m:a",)))
    result = change(before, after)
    assert (result.gpu, result.others) == (pytest.approx(-0.1), pytest.approx(0.02))
    assert (result.startup_s, result.tuning_s) == (-5.0, {"a": -5.0, "b": 0.0})
    assert (result.kernels, result.pinned) == ({"a": pytest.approx(-0.1)}, {"m:a"})


def test_the_slowest_process_decides_the_startup() -> None:
    before = run(*(process(rank, tuning_s={"a": time_s}) for rank, time_s in (("0", 9.0), ("1", 7.0))))
    after = run(*(process(rank, tuning_s={"a": time_s}) for rank, time_s in (("0", 1.0), ("1", 2.0))))
    assert change(before, after).startup_s == -7.0


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (run(process(opened=None)), run(process(opened=None)), "last run-time tuning"),
        (run(process(gpu_us=1.0)), run(process(closed=61, gpu_us=1.0)), "other launches"),
        (run(process(gpu_us=1.0)), run(), "other launches"),
        (run(process(), process()), run(process(), process()), "no RANK"),
        (run(process()), run(process()), "no GPU"),
    ],
)
def test_other_runs_are_not_compared(before: Run, after: Run, reason: str) -> None:
    result = change(before, after)
    assert result.gpu is None
    assert reason in result.reason
