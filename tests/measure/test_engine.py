"""The experiment: who times what in which process, and what a failure ends."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from places import PLANTED

from fp8tune.errors import MachineError
from fp8tune.measure.arms import Arm, KernelArm, Place, Work
from fp8tune.measure.backends import GpuBackend
from fp8tune.measure.engine import Group, Schedule, Turn, measure
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.measure.trees import Tree
from fp8tune.measure.worker import Worker, WorkerPool
from fp8tune.records import ClockLimits, Device, NamedInts, Outcome, Problem, Status

OK = Outcome(Status.OK, time_us=100.0)
CRASHED = Outcome(Status.CRASHED, reason="planted")


@dataclass(frozen=True)
class Named(Arm):
    name: str

    @property
    def work(self) -> Work:
        return Work(self.name, 1000)

    def build(self, torch_device: str) -> None:
        raise AssertionError("no process runs it")

    def launcher(self, torch_device: str) -> Callable[[], object]:
        raise AssertionError("no process runs it")


@dataclass
class FakeWorkers:
    """A back end whose workers write down what they are asked; ``faults``: (step, arm's name) -> outcome, once."""

    faults: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def worker(self, tree: Tree | None = None) -> Any:
        self.calls.append(("worker", tree))
        return self

    def _answer(self, step: str, arm: Named, *place: Place) -> Outcome:
        self.calls.append((step, arm.name, *place))
        return self.faults.pop((step, arm.name), OK)

    def __getattr__(self, step: str) -> Any:
        if step not in ("build", "launch", "check", "block", "checked_block"):
            raise AttributeError(step)
        return partial(self._answer, step.removeprefix("checked_"))

    def close(self) -> None:
        self.calls.append(("close",))


def groups(*names: str) -> list[Group[Named, str]]:
    return [Group(name, [Named(f"{name}{number}") for number in (1, 2)]) for name in names]


def run(backend: Any, timed: Iterable[Group[Any, Any]], **schedule: Any) -> list[Turn[Any, Any]]:
    return list(measure(backend, list(timed), Schedule(**{"processes": range(1, 3), "rounds": 2, **schedule})))


def test_each_process_is_fresh_and_times_each_group_once() -> None:
    backend, both = FakeWorkers(), groups("a", "b")
    turns = run(backend, both)
    assert [(turn.group.subject, turn.process, len(turn.blocks)) for turn in turns] == [
        ("a", 1, 4), ("b", 1, 4), ("a", 2, 4), ("b", 2, 4),
    ]  # fmt: skip
    steps = [step for step, *_ in backend.calls]
    one_group = ["build", "launch", "launch", *["block"] * 4]
    assert steps == 2 * ["worker", *one_group, *one_group, "close"]
    assert [group.processes for group in both] == [{1, 2}] * 2
    assert run(backend, both) == []
    assert len(backend.calls) == len(steps)  # no worker is started for nothing


def test_a_block_knows_its_place_and_what_came_before() -> None:
    (turn,) = run(FakeWorkers(), groups("a"), processes=range(3, 4), order=lambda group, *_: group.arms[::-1])
    assert [(block.arm.name, block.place) for block in turn.blocks] == [
        ("a2", Place(3, 0, 0)), ("a1", Place(3, 0, 1, "a2")), ("a2", Place(3, 1, 0)), ("a1", Place(3, 1, 1, "a2")),
    ]  # fmt: skip


@pytest.mark.parametrize("step", ["launch", "block"])
def test_an_arm_that_fails_is_out_and_the_turn_begins_anew(step: str) -> None:
    backend = FakeWorkers({(step, "a2"): CRASHED})
    (group,) = groups("a")
    failed, *rest = run(backend, [group])
    assert [(block.arm.name, block.outcome) for block in failed.failed] == [("a2", CRASHED)]
    assert failed.blocks == ()
    assert [(turn.process, {block.arm.name for block in turn.blocks}) for turn in rest] == [(1, {"a1"}), (2, {"a1"})]
    assert {block.place.process for block in rest[0].blocks} == {1001}  # a new process is numbered anew
    assert {block.place.process for block in rest[1].blocks} == {2}


def test_a_duplicate_goes_with_its_arm() -> None:
    group = Group("a", [Named("a1"), Named("a2"), Named("a2", duplicate=True)])
    run(FakeWorkers({("block", "a2"): CRASHED}), [group])
    assert group.arms == [Named("a1")]


def test_a_failure_may_end_the_group() -> None:
    backend, both = FakeWorkers({("block", "a2"): CRASHED}), groups("a", "b")
    turns = run(backend, both, on_failure="end")
    assert [(turn.group.subject, len(turn.blocks)) for turn in turns] == [("a", 0), ("b", 4), ("b", 4)]
    assert [group.failure for group in both] == ["planted", ""]


def test_tensors_that_cannot_be_built_end_the_group() -> None:
    both = groups("a", "b")
    turns = run(FakeWorkers({("build", "a1"): Outcome(Status.OUT_OF_MEMORY, reason="planted")}), both)
    assert [turn.group.subject for turn in turns] == ["a", "b", "b"]
    assert both[0].failure == "planted"
    assert len(both[0].arms) == 2


def test_a_time_budget_ends_it_between_turns() -> None:
    over = iter([False, False, False, True])
    assert len(run(FakeWorkers(), groups("a", "b"), is_over=lambda: next(over))) == 3


def test_a_checked_schedule_checks_before_the_first_block() -> None:
    backend = FakeWorkers({("check", "a1"): Outcome(Status.WRONG, reason="planted")})
    turns = run(backend, groups("a"), processes=range(1), is_checked=True)
    assert [len(turn.blocks) for turn in turns] == [0, 2]
    assert "launch" not in {step for step, *_ in backend.calls}


# Several code trees in turns

CONFIG = NamedInts(BLOCK_SIZE=64, num_warps=4)


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Tree, Tree]:
    """Launches of the second break; see ``breaking.py``."""
    text = (PLANTED / "breaking.py").read_text()
    made = []
    for name, message in (("one", text), ("two", text.replace("BREAKS = False", "BREAKS = True"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "breaking.py").write_text(message)
        made.append(Tree(name, tmp_path / name, tmp_path / f"{name}-cache"))
    return made[0], made[1]


def rows(trees: tuple[Tree, Tree], *sizes: int) -> list[Group[KernelArm, int]]:
    """For each K, which says how it breaks: the first tree, the second, and the first again."""
    return [
        Group(
            K,
            [
                KernelArm(
                    f"{tree.folder}/breaking.py:SPEC", Problem("breaking", NamedInts(M=2, K=K)), CONFIG,
                    NamedInts(K=K), 16 * K, seat=seat,
                )
                for seat, tree in enumerate((trees[0], trees[1], trees[0]))
            ],
        )
        for K in sizes
    ]  # fmt: skip


def forth_and_back(group: Group[KernelArm, int], process: int, round: int) -> list[KernelArm]:
    return [*group.arms, *reversed(group.arms)]


@pytest.mark.parametrize("broken", [128, 256])
def test_a_launch_that_breaks_its_process_is_its_own_groups_matter(trees: tuple[Tree, Tree], broken: int) -> None:
    """At its first launch, or later, inside a block. Every later launch in that process would fail."""
    results = rows(trees, 64, broken, 64)
    turns = run(
        GpuBackend(Device("sm_90"), None, "cpu"), results, rounds=1, order=forth_and_back, on_failure="end",
        trees=(*trees, trees[0]),
    )  # fmt: skip
    reason = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [group.failure for group in results] == ["", reason, ""]
    assert [len(turn.blocks) for turn in turns] == [6, 0, 6, 6, 6]
    (bad,) = [turn for turn in turns if turn.failed]
    assert [(block.arm.seat, block.outcome.status) for block in bad.failed] == [(1, Status.CRASHED)]
    processes = [sorted({block.place.process for block in turn.blocks}) for turn in turns]
    assert processes == [[3, 4, 5], [], [3, 5, 3004], [6, 7, 8], [6, 7, 8]]
    assert all(block.place.clock == turn.process for turn in turns for block in turn.blocks)


def test_a_worker_that_hangs_is_replaced(trees: tuple[Tree, Tree]) -> None:
    results = rows(trees, 64, 512, 64)
    backend = GpuBackend(Device("sm_90"), None, "cpu")
    backend.trial_timeout_s = 5.0
    run(backend, results, processes=range(1), rounds=1, on_failure="end", trees=(*trees, trees[0]))
    assert [group.failure for group in results] == ["", "no answer in 5 s", ""]


LIMITS = [ClockLimits(1980, 2619, 700.0), ClockLimits(None, 2619, 700.0), ClockLimits(1980, 2619, 500.0)]


def test_blocks_at_another_power_limit_or_clock_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the coarse pass, the confirmation, and from one to the other; an unreadable limit is no difference."""
    outcomes = iter(replace(OK, limits=limits) for limits in LIMITS)
    backend = GpuBackend(Device("sm_90"), None, "cpu")
    monkeypatch.setattr(WorkerPool, "submit", lambda *_, **__: done(next(outcomes)))
    monkeypatch.setattr(Worker, "call", lambda *_: next(outcomes))
    arm = KernelArm("any", Problem("any", NamedInts(M=1)), CONFIG)
    assert [outcome.limits for _, outcome in backend.screen([arm], [Place()])] == LIMITS[:1]
    assert backend.worker().block(arm, Place()).limits == LIMITS[1]
    with pytest.raises(MachineError, match="power limit was 700 W and is 500 W while it was timed"):
        backend.worker().checked_block(arm, Place())


def done(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


@pytest.mark.parametrize(("field", "name"), [(0, "SM clock limit"), (1, "memory clock"), (2, "power limit")])
def test_every_limit_is_part_of_what_may_be_compared(field: int, name: str) -> None:
    values = [1980, 2619, 700.0]
    before, values[field] = ClockLimits(*values), 400
    assert before.difference(ClockLimits(*values)).startswith(f"{name} was ")
    assert before.difference(before) == before.difference(ClockLimits()) == ClockLimits().difference(before) == ""
    assert ClockLimits().merged(before) == before.merged(ClockLimits(1, 1, 1.0)) == before


def test_the_simulated_gpu_needs_no_process() -> None:
    arms = [Named("a"), Named("b"), Named("b", duplicate=True)]
    (single, two) = run(SimulatedBackend("simulated:1"), [Group("", arms)])
    assert len({block.outcome.time_us for block in (*single.blocks, *two.blocks)}) == 12
    (again, _) = run(SimulatedBackend("simulated:1"), [Group("", list(arms))])
    assert [block.outcome.samples_us for block in again.blocks] == [block.outcome.samples_us for block in single.blocks]
    logs = [math.log(block.outcome.time_us or 0) for block in (*single.blocks, *two.blocks) if block.arm.name == "b"]
    assert max(logs) - min(logs) < 0.2


def test_the_worker_that_screened_is_ended_before_another_times() -> None:
    """Its context and what it holds of the device's memory would disturb the clock."""
    backend = GpuBackend(Device("sm_90"), None, "cpu")
    screening = backend.runners.submit(60, os.getpid).result()
    os.kill(screening, 0)
    backend.worker().close()
    with pytest.raises(ProcessLookupError):
        os.kill(screening, 0)
