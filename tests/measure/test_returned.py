"""A launch may return its outputs: they are checked like those it is given, and for what else may be wrong of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from places import PLANTED

from fp8tune.measure import checking, kept
from fp8tune.measure import trial as measure
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.timing import Samples
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.loading import load_spec

REFERENCE = f"{PLANTED / 'returned.py'}:SPEC"
PROBLEM = Problem("planted-returned", NamedInts(M=6, K=16))

FOUND = {
    2: "output 0: 1 of 96 elements differ, first at (5, 15)",
    3: "output 1: the launch returned torch.float32 of shape (6, 1) and strides (1, 1) on ",
    4: "output 1: the launch returned torch.float64 of shape (6,)",
    5: "output 1: the launch returned NoneType, wanted a tensor",
    6: "the launch returned 1 outputs, wanted 2",
    7: "launch 2: output 0: 96 of 96 elements differ",
    8: "output 0: the launch returned torch.float32 of shape (6, 16) and strides (1, 6) on ",
    9: "output 0: 96 of 96 elements differ",
}


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """As a worker begins: nothing built, nothing checked, no launch counted."""
    for counted in ("launches", "kept"):
        load_spec(REFERENCE).launch.__globals__[counted].clear()
    kept.forget()
    yield
    kept.forget()


def clock(launch: Callable[[], object], too_slow_us: float | None) -> Samples:
    for _ in range(9):
        launch()
    return Samples((100.0,), None)


def trial(fault: int, device: str, timing: measure.Clock | None = None) -> Outcome:
    arm = KernelArm(REFERENCE, PROBLEM, NamedInts(FAULT=fault, num_warps=4))
    return measure.checked_block(arm, device, 0, times=timing is not None, clock=timing)


@pytest.mark.parametrize("fault", [0, 1])
def test_outputs_are_right_whether_they_are_returned_or_written(fault: int, device: str) -> None:
    assert trial(fault, device) == Outcome(Status.OK)
    assert trial(fault, device, clock).time_us == 100.0


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_in_what_is_returned_is_found_and_harms_no_other(fault: int, device: str) -> None:
    outcome = trial(fault, device)
    assert outcome.status is Status.WRONG
    assert FOUND[fault] in outcome.reason, outcome.reason
    assert trial(0, device) == Outcome(Status.OK)
    assert trial(1, device) == Outcome(Status.OK)


def test_the_last_timed_launch_is_looked_at(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "IN_A_ROW_BYTES", 0)
    outcome = trial(10, device, clock)
    assert outcome.reason.startswith("after timed launches: output 1: 6 of 6 elements differ")


@pytest.mark.parametrize("fault", [5, 7, 10])
def test_launches_in_a_row_look_at_what_each_returns(fault: int, device: str) -> None:
    tensors = checking.build(load_spec(REFERENCE), PROBLEM, device)
    right = NamedInts(FAULT=0, num_warps=4)
    assert tensors.check_in_a_row(right, 8) is None
    wrong = tensors.check_in_a_row(NamedInts(FAULT=fault, num_warps=4), 8)
    assert wrong is not None
    assert f"{ {5: 8, 7: 7, 10: 4}[fault] } of 8 launches in a row gave wrong outputs" in wrong
    assert tensors.check_in_a_row(right, 8) is None


def test_no_output_of_the_launch_before_is_held_beside_the_next(device: str) -> None:
    tensors = checking.build_unchecked(load_spec(REFERENCE), PROBLEM, device)
    tensors.launch(NamedInts(FAULT=0, num_warps=4))
    assert tensors.written is tensors.returned
    tensors.launch(NamedInts(FAULT=1, num_warps=4))
    assert tensors.returned is None
    assert torch.equal(tensors.written[0], 2 * tensors.inputs[0])
