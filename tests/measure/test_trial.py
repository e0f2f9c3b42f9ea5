"""What a worker asks of its clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fp8tune.measure import trial as measure
from fp8tune.measure.checking import HOPELESS_RATIO, Bench
from fp8tune.measure.clock import Block, Trial
from fp8tune.records import NamedInts, Problem
from fp8tune.revisions.loading import load_spec

PROBLEM = Problem("rowwise-2d", NamedInts(M=64, K=64))


class RecordingClock:
    """Takes 100 us for everything, and keeps what it is told."""

    runs_kernels = True

    def __init__(self) -> None:
        self.told: list[Trial] = []

    def block(self, launch: Callable[[], None], trial: Trial) -> Block:
        self.told.append(trial)
        return Block((100.0,), None)


def test_only_the_first_round_gives_up_on_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches that a machine held up once passed for a slow config in its third round: two blocks said 268 us,
    and the look 585 us."""
    spec, clock = load_spec("rowwise-2d"), RecordingClock()
    bench = Bench(spec, PROBLEM, (), (), ())
    bench.passed.add(spec.default)
    monkeypatch.setattr(measure, "make_timer", lambda name: clock)
    monkeypatch.setattr(measure, "_prepare", lambda *what: bench)
    for number in (0, 0, 1, 2):
        measure.run_trial("rowwise-2d", PROBLEM, spec.default, "recording", "cpu", number)
    assert [trial.round for trial in clock.told] == [0, 0, 1, 2]
    assert [trial.hopeless_us for trial in clock.told] == [float("inf"), HOPELESS_RATIO * 100, None, None]
