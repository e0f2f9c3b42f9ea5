"""The rounds of a comparison, also when a launch breaks its process: only its own row is blamed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from places import PLANTED

from fp8tune.comparing import verdicts
from fp8tune.comparing.rows import Row, retuned
from fp8tune.comparing.timing import ORDERS, RowTimes, time_rounds
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.backends.gpu import GpuBackend
from fp8tune.measure.engine import Group, TimedBlock, Turn
from fp8tune.measure.timing import UNGATED
from fp8tune.measure.trees import Tree
from fp8tune.records import Device, NamedInts, Outcome, Problem, Status, Telemetry

CONFIG = NamedInts(BLOCK_SIZE=64, num_warps=4)
BROKEN = "crashed: RuntimeError: CUDA error: an illegal memory access was encountered"


def gpu(timeout_s: float = 60) -> GpuBackend:
    """A GPU whose clock the planted kernels replace."""
    return GpuBackend(Device("sm_90"), None, torch_device="cpu", timeout_s=timeout_s)


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Tree, Tree]:
    """Two sides; launches of the second break."""
    text = (PLANTED / "breaking.py").read_text()
    made = []
    for name, said in (("one", text), ("two", text.replace("BREAKS = False", "BREAKS = True"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "breaking.py").write_text(said)
        made.append(Tree(name, tmp_path / name, tmp_path / f"{name}-cache"))
    return made[0], made[1]


def rows(trees: tuple[Tree, Tree], *sizes: int) -> list[Row]:
    """A row for each K, which says how it breaks."""

    def arm(tree: Tree, K: int) -> KernelArm:
        problem = Problem("breaking", NamedInts(M=2, K=K))
        return KernelArm(f"{tree.folder}/breaking.py:SPEC", problem, CONFIG, NamedInts(K=K), 8 * 2 * K)

    return [Row(arm(trees[0], K), arm(trees[1], K)) for K in sizes]


def timed(trees: tuple[Tree, Tree], *sizes: int, rounds: int = 2, timeout_s: float = 60) -> list[RowTimes]:
    steps = time_rounds(gpu(timeout_s), trees, rows(trees, *sizes), range(rounds))
    while True:
        try:
            next(steps)
        except StopIteration as stopped:
            return list(stopped.value)


@pytest.mark.parametrize("broken", [128, 256])
def test_a_launch_that_breaks_its_process_is_its_own_rows_matter(trees: tuple[Tree, Tree], broken: int) -> None:
    """At its first launch, or later, inside a block. Every later launch in that process would fail."""
    first, bad, last = timed(trees, 64, broken, 64)
    assert bad.failure == f"after: {BROKEN}"
    assert bad.changes == []
    for neighbour in (first, last):
        assert neighbour.failure == ""
        assert neighbour.changes == neighbour.controls == [0.0, 0.0]
        assert neighbour.blocks == 12


def test_a_worker_that_hangs_is_replaced(trees: tuple[Tree, Tree]) -> None:
    times = timed(trees, 64, 512, 64, rounds=1, timeout_s=6)
    assert [each.failure for each in times] == ["", "after: timeout: no answer in 6 s", ""]
    assert [each.blocks for each in times] == [6, 0, 6]


def test_a_config_that_breaks_its_process_is_not_the_tuned_one(trees: tuple[Tree, Tree]) -> None:
    (row,) = rows(trees, 128)
    sizes = (64, 128, 32)
    arms = [dataclasses.replace(row.after, config=NamedInts(BLOCK_SIZE=size, num_warps=4)) for size in sizes]
    assert retuned(gpu(), trees[1], [arms]) == [arms[2]]
    assert retuned(gpu(), trees[1], [arms[:2]]) == [arms[0]]  # none can be timed: the first


def test_blocks_of_a_slow_device_are_counted(trees: tuple[Tree, Tree]) -> None:
    good = Outcome(Status.OK, time_us=100.0, telemetry=Telemetry(throttle_reasons=0x4))  # a power cap is normal
    hot = dataclasses.replace(good, telemetry=Telemetry(throttle_reasons=0x24))
    ungated = dataclasses.replace(good, reason=UNGATED)
    times = RowTimes(*rows(trees, 64))

    def add(arch: str, *seats: tuple[Outcome, Outcome]) -> None:
        blocks = [(arm, each) for arm, two in zip(times.arms, seats, strict=True) for each in two]
        timed_blocks = tuple(TimedBlock(arm, Place(), each) for arm, each in blocks)
        times.add(Turn(Group(times, times.arms), 0, timed_blocks), arch)

    add("sm_90", (good, hot), (good, ungated), (good, good))
    assert (times.blocks, times.ungated, times.throttled, times.slowdowns) == (6, 1, 1, {"software thermal"})
    add("gfx942", (hot, hot), (hot, hot), (hot, hot))  # whose bits say something else
    assert times.throttled == 1


def test_every_arm_has_every_place_equally_often() -> None:
    """Whatever a place in the turns does to a block, it does to both sides alike, on each row and in each stage."""
    for rounds in (verdicts.STAGE_ONE_ROUNDS, verdicts.STAGE_TWO_ROUNDS):
        assert rounds % len(ORDERS) == 0
