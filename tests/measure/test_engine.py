"""The experiment: who times what in which process, and what a failure ends."""

from __future__ import annotations

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


def summary(turns: Iterable[Turn[Any, Any]]) -> list[tuple[str, int, int]]:
    return [(turn.group.subject, turn.process, len(turn.blocks)) for turn in turns]


def test_each_process_is_fresh_and_times_each_group_once() -> None:
    backend, both = FakeWorkers(), groups("a", "b")
    assert summary(run(backend, both)) == [("a", 1, 4), ("b", 1, 4), ("a", 2, 4), ("b", 2, 4)]
    steps = [step for step, *_ in backend.calls]
    assert steps == 2 * ["worker", *2 * ["build", "launch", "launch", *["block"] * 4], "close"]
    assert [group.processes for group in both] == [{1, 2}] * 2
    assert run(backend, both) == []
    assert len(backend.calls) == len(steps)  # no worker is started for nothing


def test_a_block_knows_its_place_and_what_came_before() -> None:
    (turn,) = run(FakeWorkers(), groups("a"), processes=range(3, 4), order=lambda group, *_: group.arms[::-1])
    in_order = [
        ("a2", Place(3, 0, 0)),
        ("a1", Place(3, 0, 1, "a2")),
        ("a2", Place(3, 1, 0)),
        ("a1", Place(3, 1, 1, "a2")),
    ]
    assert [(block.arm.name, block.place) for block in turn.blocks] == in_order


@pytest.mark.parametrize("step", ["launch", "block"])
def test_an_arm_that_fails_is_out_with_its_duplicate_and_the_turn_begins_anew(step: str) -> None:
    group = Group("a", [Named("a1"), Named("a2"), Named("a2", duplicate=True)])
    failed, *rest = run(FakeWorkers({(step, "a2"): CRASHED}), [group])
    assert ([(block.arm.name, block.outcome) for block in failed.failed], failed.blocks) == ([("a2", CRASHED)], ())
    assert group.arms == [Named("a1")]
    # a new process is numbered anew
    assert [{(block.arm.name, block.place.process) for block in turn.blocks} for turn in rest] == [
        {("a1", 1001)},
        {("a1", 2)},
    ]


@pytest.mark.parametrize(("step", "options"), [("block", {"on_failure": "end"}), ("build", {})])
def test_a_failure_may_end_the_group(step: str, options: dict[str, str]) -> None:
    backend, both = FakeWorkers({(step, "a1"): Outcome(Status.OUT_OF_MEMORY, reason="planted")}), groups("a", "b")
    assert summary(run(backend, both, **options)) == [("a", 1, 0), ("b", 1, 4), ("b", 2, 4)]
    assert [(group.failure, len(group.arms)) for group in both] == [("planted", 2), ("", 2)]


def test_a_time_budget_ends_it_between_turns() -> None:
    over = iter([False, False, False, True])
    assert len(run(FakeWorkers(), groups("a", "b"), is_over=lambda: next(over))) == 3


def test_a_checked_schedule_checks_before_the_first_block() -> None:
    backend = FakeWorkers({("check", "a1"): Outcome(Status.WRONG, reason="planted")})
    assert summary(run(backend, groups("a"), processes=range(1), is_checked=True)) == [("a", 0, 0), ("a", 0, 2)]
    assert "launch" not in {step for step, *_ in backend.calls}


def test_the_first_process_alone_may_check() -> None:
    backend = FakeWorkers()
    run(backend, groups("a"), is_first_checked=True)
    first, second = ["build", "check", "check", *["block"] * 4], ["build", "launch", "launch", *["block"] * 4]
    assert [step for step, *_ in backend.calls] == ["worker", *first, "close", "worker", *second, "close"]


# Several code trees in turns

CONFIG = NamedInts(BLOCK_SIZE=64, num_warps=4)


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Tree, Tree]:
    """Launches of the second break; see ``breaking.py``."""
    text = (PLANTED / "breaking.py").read_text()
    made = []
    for name, source in (("one", text), ("two", text.replace("BREAKS = False", "BREAKS = True"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "breaking.py").write_text(source)
        made.append(Tree(name, tmp_path / name, tmp_path / f"{name}-cache"))
    return made[0], made[1]


def rows(trees: tuple[Tree, Tree], *sizes: int) -> list[Group[KernelArm, int]]:
    """For each K, which says how it breaks: the first tree, the second, and the first again."""

    def arm(tree: Tree, K: int, seat: int) -> KernelArm:
        problem = Problem("breaking", NamedInts(M=2, K=K))
        return KernelArm(f"{tree.folder}/breaking.py:SPEC", problem, CONFIG, NamedInts(K=K), 16 * K, seat=seat)

    return [Group(K, [arm(tree, K, seat) for seat, tree in enumerate((*trees, trees[0]))]) for K in sizes]


def test_a_launch_that_breaks_its_process_is_its_own_groups_matter(trees: tuple[Tree, Tree]) -> None:
    """Inside a block. Every later launch in that process would fail."""
    results = rows(trees, 64, 256, 64)
    schedule = {
        "order": lambda group, *_: [*group.arms, *reversed(group.arms)],
        "trees": (*trees, trees[0]),
        "on_failure": "end",
        "rounds": 1,
    }
    turns = run(GpuBackend(Device("sm_90"), None, "cpu"), results, **schedule)
    reason = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [group.failure for group in results] == ["", reason, ""]
    assert [len(turn.blocks) for turn in turns] == [6, 0, 6, 6, 6]
    (bad,) = [turn for turn in turns if turn.failed]
    assert [(block.arm.seat, block.outcome.status) for block in bad.failed] == [(1, Status.CRASHED)]
    processes = [sorted({block.place.process for block in turn.blocks}) for turn in turns]
    assert processes == [[3, 4, 5], [], [3, 5, 3004], [6, 7, 8], [6, 7, 8]]
    assert all(block.place.clock == turn.process for turn in turns for block in turn.blocks)


LIMITS = [ClockLimits(1980, 2619, 700.0), ClockLimits(None, 2619, 700.0), ClockLimits(1980, 2619, 500.0)]


def test_blocks_at_another_power_limit_or_clock_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the coarse pass, the confirmation, and from one to the other; an unreadable limit is no difference."""
    outcomes, done = iter(replace(OK, limits=limits) for limits in LIMITS), Future[Outcome]()
    done.set_result(next(outcomes))
    backend = GpuBackend(Device("sm_90"), None, "cpu")
    monkeypatch.setattr(WorkerPool, "submit", lambda *_, **__: done)
    monkeypatch.setattr(Worker, "call", lambda *_: next(outcomes))
    arm = KernelArm("any", Problem("any", NamedInts(M=1)), CONFIG)
    assert [outcome.limits for _, outcome in backend.screen([arm], [Place()])] == LIMITS[:1]
    assert backend.worker().block(arm, Place()).limits == LIMITS[1]
    with pytest.raises(MachineError, match="power limit was 700 W and is 500 W while it was timed"):
        backend.worker().checked_block(arm, Place())


@pytest.mark.parametrize(("place", "name"), [(0, "SM clock limit"), (1, "memory clock"), (2, "power limit")])
def test_every_limit_is_part_of_what_may_be_compared(place: int, name: str) -> None:
    values = [1980, 2619, 700.0]
    before, values[place] = ClockLimits(*values), 400
    assert before.difference(ClockLimits(*values)).startswith(f"{name} was ")
    assert before.difference(before) == before.difference(ClockLimits()) == ClockLimits().difference(before) == ""
    assert ClockLimits().merged(before) == before.merged(ClockLimits(1, 1, 1.0)) == before


def test_the_simulated_gpu_needs_no_process() -> None:
    def times_us() -> list[float | None]:
        group = Group("", [Named("a"), Named("b"), Named("b", duplicate=True)])
        return [
            block.outcome.time_us for turn in run(SimulatedBackend("simulated:1"), [group]) for block in turn.blocks
        ]

    assert (len(set(times_us())), times_us()) == (12, times_us())


def test_the_worker_that_screened_is_ended_before_another_times() -> None:
    """Its context and what it holds of the device's memory would disturb the clock."""
    backend = GpuBackend(Device("sm_90"), None, "cpu")
    screening = backend.runners.submit(60, os.getpid).result()
    os.kill(screening, 0)
    backend.worker().close()
    with pytest.raises(ProcessLookupError):
        os.kill(screening, 0)
