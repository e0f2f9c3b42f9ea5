"""How long a sweep still takes: always finite, never less for more work, zero at the end, and near the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from places import PLANTED

from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.trees import Tree
from fp8tune.records import Outcome
from fp8tune.store.results import Store
from fp8tune.sweep import planning, session
from fp8tune.sweep.estimate import Estimate
from fp8tune.sweep.events import Event, FinalsStarted, Finished
from fp8tune.sweep.options import Options

Timed = tuple[float, Event]


def ratios(timed: Sequence[Timed], shares: Sequence[float]) -> list[float]:
    """What was said to be left over what was, once each share of the time was done."""
    estimate, end, asked, found = Estimate(), timed[-1][0], list(shares), []
    for now, event in timed:
        estimate.take(event, now)
        if asked and now >= asked[0] * end:
            asked.pop(0)
            left_s = estimate.left_s(now)
            assert left_s is not None
            found.append(left_s / (end - now))
    assert estimate.left_s(end) == 0
    return found


class Clocked(FakeGpu):
    """The simulated GPU on a clock of its own: what a config takes when it is first tried, and a fresh process."""

    now, check_s, block_s, fresh_s = 0.0, 0.0, 0.017, 1.0

    def worker(self, tree: Tree | None = None) -> Clocked:  # type: ignore[override]
        self.now += self.fresh_s
        return self

    def block(self, arm: Arm, place: Place) -> Outcome:
        assert isinstance(arm, KernelArm)
        self.now += self.block_s + (self.check_s if place.process == place.round == 0 else 0.0)
        return SimulatedBackend.block(self, arm, place)


def clocked(folder: Path, seed: int, check_s: float, budget_s: float | None = None) -> list[Timed]:
    """A sweep of two problems by its own clock."""
    shapes = folder / "two.toml"
    shapes.write_text("[[rows]]\nM = 16384\nK = [2048, 4096]\nN = 8\nE = 2\n")
    timer, kernel = f"simulated:{seed}", f"{PLANTED / 'faults.py'}:SPEC"
    given = Options((kernel,), shapes=(str(shapes),), grid=("num_warps=4,8",), timer=timer, time_budget_s=budget_s)
    gpu = Clocked(timer)
    gpu.check_s = check_s
    with Store.open(str(folder / "results.db"), create=True) as store:
        plan = replace(planning.expanded(planning.planned(given)), backend=gpu)
        return [(gpu.now, event) for event in session.run(store, plan, lambda: gpu.now)]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_simulated_clock_is_told_within_a_third(tmp_path: Path, seed: int) -> None:
    """The finals take nearly all of it; once it said 2 s with 98 s left."""
    timed = clocked(tmp_path, seed, check_s=0.0)
    finals = next(now for now, event in timed if isinstance(event, FinalsStarted))
    assert finals < 0.2 * timed[-1][0]
    assert all(2 / 3 <= ratio <= 4 / 3 for ratio in ratios(timed, (0.25, 0.4, 0.5, 0.6, 0.75)))


@pytest.mark.parametrize(("budget_s", "check_s"), [(3.0, 0.5), (8.0, 0.0), (12.0, 0.0)])
def test_a_time_budget_is_kept_within_a_tenth(tmp_path: Path, budget_s: float, check_s: float) -> None:
    """In the screen of one problem and in the finals; once the screen of a problem went on to its end."""
    *_, (ended, last) = clocked(tmp_path, 1, check_s, budget_s)
    assert isinstance(last, Finished)
    assert last.left_out > 0
    assert 0.5 * budget_s < ended <= 1.1 * budget_s
