"""How long a sweep still takes: always finite, never less for more work, zero at the end, and near the truth."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from hypothesis import given
from hypothesis import strategies as st
from places import PLANTED

from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.trees import Tree
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.stats.calibration import plan_for
from fp8tune.store.results import Store
from fp8tune.sweep import planning, session
from fp8tune.sweep.estimate import Estimate, Work
from fp8tune.sweep.events import Ahead, Event, FinalsAhead, FinalsStarted, Finished, RoundStarted, Started, TrialDone
from fp8tune.sweep.options import Options

KINDS = ("problems", "trials", "repeats", "processes", "turns")
amounts = st.floats(0, 1e6)
works = st.builds(Work, *[amounts] * len(KINDS))


@given(works, works, works)
def test_more_work_never_takes_less(work: Work, more: Work, pace: Work) -> None:
    longer = Work(*(getattr(work, kind) + getattr(more, kind) for kind in KINDS))
    assert 0 <= work.seconds(pace) <= longer.seconds(pace) < math.inf
    assert Work().seconds(pace) == 0


DEVICE = Device(arch="sm_90", name="a GPU")
JUDGED_AFTER = (4, 8, 16, 32)
BLOCKS = 6
Timed = tuple[float, Event]


def sweep_of(seed: int) -> Iterator[Timed]:
    """What a sweep on a GPU may be like: problems, configs and seconds as in 24 sweeps on an H100 and an H200."""
    draw = random.Random(seed)
    problems = [Problem("kernel", NamedInts(M=number)) for number in range(draw.randint(4, 10))]
    configs = {problem: draw.randint(40, 70) for problem in problems}
    near, arms = draw.uniform(0.2, 0.5), draw.randint(6, 9)
    block_s, check_s, begin_s = draw.uniform(0.015, 0.04), draw.uniform(0, 0.02), draw.uniform(0.3, 0.9)
    fresh_s, now = draw.uniform(0.8, 1.2), 0.0
    ahead = Ahead(Kind.MEASURED, configs, 3, JUDGED_AFTER, BLOCKS, 8, 1.0)

    def row(problem: Problem, round: int = 0, process: str = "screen", stage: str = "screen") -> TrialDone:
        done = Row(problem, NamedInts(), DEVICE, Kind.MEASURED, Outcome(Status.OK, 1.0), stage=stage, round=round)
        return TrialDone(replace(done, process=process), False)

    yield now, Started(DEVICE, sum(configs.values()), 0, ahead)
    for problem in problems:
        now += begin_s
        for round in range(3):
            count = int(near * configs[problem]) if round else configs[problem]
            yield now, RoundStarted(problem, round, 3, count)
            for _ in range(count):
                now += (block_s + check_s * (round == 0)) * draw.uniform(0.8, 1.2)
                yield now, row(problem, round)
        yield now, FinalsAhead(problem, arms, 0)
    needed = {problem: draw.choices(JUDGED_AFTER, (91, 5, 2, 2))[0] for problem in problems}
    for process in range(1, max(needed.values()) + 1):
        now += fresh_s
        for problem in (each for each in problems if needed[each] >= process):
            now += arms * BLOCKS * block_s
            for _ in range(arms * BLOCKS):
                yield now, row(problem, 0, f"final {process}", "final")
            if process in (3, *JUDGED_AFTER):
                # what three processes show is wrong now and then
                told = needed[problem] if process > 3 or draw.random() < 0.9 else draw.choice(JUDGED_AFTER[:2])
                yield now, FinalsAhead(problem, arms, process, told)
    yield now, Finished(0, now)


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


def test_most_sweeps_are_within_a_third_once_a_quarter_is_done() -> None:
    """Some are not: nobody knows beforehand which problem will need eight times the processes."""
    found = [ratios(list(sweep_of(seed)), (0.25, 0.4, 0.5)) for seed in range(14)]
    for at in zip(*found, strict=True):
        assert sum(2 / 3 <= ratio <= 4 / 3 for ratio in at) >= 0.75 * len(at), at
        assert max(at) < 2, at


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


def test_a_screen_that_takes_most_of_it_is_told_too(tmp_path: Path) -> None:
    timed = clocked(tmp_path, 1, check_s=0.5)
    assert all(0.5 <= ratio <= 1.5 for ratio in ratios(timed, (0.25, 0.4, 0.5)))


@pytest.mark.parametrize(("budget_s", "check_s"), [(3.0, 0.5), (8.0, 0.0), (12.0, 0.0)])
def test_a_time_budget_is_kept_within_a_tenth(tmp_path: Path, budget_s: float, check_s: float) -> None:
    """In the screen of one problem and in the finals; once the screen of a problem went on to its end."""
    *_, (ended, last) = clocked(tmp_path, 1, check_s, budget_s)
    assert isinstance(last, Finished)
    assert last.left_out > 0
    assert 0.5 * budget_s < ended <= 1.1 * budget_s


def test_the_budget_is_the_end_that_is_told(tmp_path: Path) -> None:
    estimate = Estimate()
    for now, event in clocked(tmp_path, 1, 0.5, 3.0)[:8]:
        estimate.take(event, now)
        assert (estimate.left_s(now) or 0.0) <= max(0.0, 3.0 - now)
        assert (estimate.most_s(now) or 0.0) <= max(0.0, 3.0 - now)


def test_totals_do_not_grow_within_a_phase(tmp_path: Path) -> None:
    """Each phase counts what is known when it begins; once the total of all grew from 8,640 to 28,000."""
    events = [event for _, event in clocked(tmp_path, 1, 0.0)]
    started = [event for event in events if isinstance(event, FinalsStarted)]
    assert [event.decision for event in started] == list(range(1, len(started) + 1))
    finals = sum(isinstance(event, TrialDone) and event.row.stage != "screen" for event in events)
    assert sum(event.trials for event in started) == finals
    rounds = [event for event in events if isinstance(event, RoundStarted)]
    screened = sum(
        isinstance(event, TrialDone) and event.row.stage == "screen" and event.row.outcome.status is not Status.PRUNED
        for event in events
    )
    assert sum(event.trials for event in rounds) == screened
    assert plan_for({}).screen_rounds == rounds[0].rounds
