"""What a cell of `fp8tune bench` runs: who is asked what, and what becomes of a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from bench_fakes import PROBLEM, FakeGpu, Named, without_a_gpu

from fp8tune.bench import cells
from fp8tune.bench.cells import Cells, Timing
from fp8tune.bench.kernel_contenders import (
    OURS,
    KernelContender,
)
from fp8tune.errors import MachineError
from fp8tune.measure.worker import Poisoned
from fp8tune.records import Outcome, Status


def test_cells_take_turns_and_one_stalled_block_is_no_cell() -> None:
    stalled = FakeGpu(lambda step, name, round: Outcome(Status.OK, 50.0 if round == 0 else 5.0 + round / 10))
    ours, theirs = (Named(name, PROBLEM) for name in ("fp8tune", "torchao"))
    timed = Cells(stalled).in_rounds([ours, theirs])
    blocks = [(name, round) for step, name, round in stalled.asked if step == "block"]
    assert blocks == [("fp8tune", 0), ("torchao", 0), ("torchao", 1), ("fp8tune", 1), ("fp8tune", 2), ("torchao", 2)]
    assert timed == {ours: Timing(5.2), theirs: Timing(5.2)}  # another one first in each round


def test_what_fails_is_out_with_its_reason_and_the_others_go_on() -> None:
    broken = Outcome(Status.CRASHED, reason="an illegal memory access")

    def outcomes(step: str, name: str, round: int) -> Outcome:
        return broken if (step, name, round) == ("block", "torchao", 1) else Outcome(Status.OK, 5.0)

    ours, theirs = (Named(name, PROBLEM) for name in ("fp8tune", "torchao"))
    timed = Cells(FakeGpu(outcomes)).in_rounds([ours, theirs])
    assert timed == {ours: Timing(5.0), theirs: Timing(reason="an illegal memory access")}


def test_a_back_end_that_times_nothing_is_refused() -> None:
    with pytest.raises(MachineError, match="needs a GPU"):
        cells.check_times(FakeGpu(lambda *_: Outcome(Status.OK), times=False))


def test_rounds_launch_what_the_first_has_built(contender: Callable[..., KernelContender]) -> None:
    ours = contender(OURS, "rowwise-2d")
    assert ours.check().reason == ""
    launch = ours.launcher("cpu")
    assert launch is ours.launcher("cpu")
    ours.build("cpu")  # the same problem: nothing is made anew
    assert launch is ours.launcher("cpu")
    other = contender(OURS, "mxfp8-dim0")  # another one: all of it is
    assert launch is not other.launcher("cpu")


@dataclass(frozen=True)
class Dying(Named):
    def build(self, torch_device: str) -> None:
        pass

    def check(self) -> Timing:
        if self.name == "dies":
            os._exit(3)
        if self.name == "fails":
            raise ValueError("planted")
        return Timing(5.0)


def test_the_worker_that_dies_costs_one_cell() -> None:
    names = ("dies", "fails", "works")
    with Cells(without_a_gpu()) as held:
        found = [held.check(Dying(name, PROBLEM)) for name in names]
    assert [timing.reason for timing in found] == ["worker exited with code 3", "ValueError: planted", ""]
    assert found[-1].time_us == 5.0


def test_a_device_error_ends_the_worker() -> None:
    def fail() -> Timing:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(Poisoned) as poisoned:
        cells.guarded(fail)
    assert isinstance(poisoned.value.value, Timing)
    assert "illegal memory access" in poisoned.value.value.reason
