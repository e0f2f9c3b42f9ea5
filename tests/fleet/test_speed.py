"""Workers share a sweep: the program itself on simulated GPUs, whose clocks count what a GPU takes for each step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fleet.crew import DEVICE, queue

from fp8tune import alive
from fp8tune.fleet.worker import Worker
from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.engine import Screened
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.measure.trees import Tree
from fp8tune.options import SweepOptions
from fp8tune.plan.shapes import Selection
from fp8tune.records import NamedInts, Outcome, Problem
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, session
from fp8tune.sweeping.picks import read
from fp8tune.sweeping.planning import Plan

START_S, PROCESS_S, CHECK_S, BLOCK_S = 2.0, 0.6, 1.2, 0.015
"""Seconds of an H100: to the first trial of a coarse pass, to the first block of a fresh process, for the checks and
the first block of a config (twenty times as long as one of colwise takes, because there are few configs here), and for
a block."""


class TimedGpu(SimulatedBackend):
    """A simulated GPU that counts the seconds of its work."""

    def __init__(self, gpu: int) -> None:
        super().__init__(f"{DEVICE},gpu={gpu}")
        self.now_s, self.is_begun = 0.0, False

    def clock_s(self) -> float:
        return self.now_s

    def worker(self, tree: Tree | None = None) -> SimulatedBackend:
        self.now_s, self.is_begun = self.now_s + PROCESS_S, False
        return self

    def screen(
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Screened]:
        if not self.is_begun:
            self.now_s, self.is_begun = self.now_s + START_S, True
        for number, (arm, place) in enumerate(zip(arms, places, strict=True)):
            self.now_s += 0.0 if place.round else CHECK_S
            yield number, self.block(arm, place)

    def block(self, arm: Arm, place: Place) -> Outcome:
        self.now_s += BLOCK_S
        return super().block(arm, place)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A sweep of two minutes: 16 problem sizes."""
    grid = ("num_warps=4,8", "BLOCK_SIZE=2", "BLOCK_SIZE_ITER=4096,8192", "num_stages=1")
    short = planning.planned(SweepOptions(kernel=("rowwise-2d",), shapes=(), grid=grid, timer=DEVICE))
    rows = [NamedInts(M=1024, K=4096 + 128 * number, E=1, N=4096 + 128 * number) for number in range(16)]
    return planning.expanded(replace(short, selections=(Selection(tuple(rows)),)))


def picks(db: str) -> dict[Problem, NamedInts]:
    with Store.open(db, writable=False) as store:
        return {pick.problem: pick.config for pick in read(store)}


def plain_s(db: str, plan: Plan) -> float:
    gpu = TimedGpu(0)
    with Store.open(db, create=True) as store:
        for _ in session.run(store, replace(plan, backend=gpu), gpu.clock_s):
            pass
    return gpu.now_s


class Crew:
    """Workers of which the one whose clock is the earliest always has its turn."""

    def __init__(self, db: str, plan: Plan, count: int) -> None:
        key = queue(db, plan).key
        self.gpus = [TimedGpu(number) for number in range(count)]
        self.workers = {
            gpu: Worker(
                db, gpu.timer, clock=gpu.clock_s, sleep=self.sleep_of(gpu), plans={key: replace(plan, backend=gpu)}
            ).run()
            for gpu in self.gpus
        }
        self.busy = set[TimedGpu]()

    def advance(self, until_s: float) -> None:
        """Let workers have turns until all clocks are later."""
        while ready := [gpu for gpu in self.workers.keys() - self.busy if gpu.now_s < until_s]:
            gpu = min(ready, key=lambda gpu: (gpu.now_s, gpu.timer))
            self.busy.add(gpu)
            if next(self.workers[gpu], None) is None:
                del self.workers[gpu]
            self.busy.remove(gpu)

    def sleep_of(self, gpu: TimedGpu) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            gpu.now_s += seconds
            self.advance(gpu.now_s)

        return sleep


def workers_s(db: str, plan: Plan, count: int) -> float:
    crew = Crew(db, plan, count)
    crew.advance(math.inf)
    return max(gpu.now_s for gpu in crew.gpus)


def test_a_sweep_of_two_minutes_has_work_for_four_workers(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker took more than twice as long as a plain sweep: each unit had fresh processes of its own."""
    monkeypatch.setattr(alive, "heard", lambda listener: contextlib.nullcontext())  # one thread has all workers
    plain = plain_s(str(tmp_path / "plain.db"), plan)
    single, four = (workers_s(str(tmp_path / f"{count}.db"), plan, count) for count in (1, 4))
    print(f"\nplain {plain:.1f} s, one {single:.1f} s, four {single / four:.2f}x")
    assert 100 < plain < 140
    assert single <= 1.05 * plain
    assert single / four >= 3.0
    assert all(picks(str(tmp_path / f"{count}.db")) == picks(str(tmp_path / "plain.db")) for count in (1, 4))
