"""Trials of the planted specs in ``tests/planted``, as a fresh worker runs them, on a clock that says 100 us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from places import PLANTED

from fp8tune.measure import checking, tensor_cache, timing, trial
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.checking import Tensors
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge

LAUNCHES = f"{PLANTED / 'launches.py'}:SPEC"
RETURNED = f"{PLANTED / 'returned.py'}:SPEC"
SUMS = {kind: f"{PLANTED / 'sums.py'}:{kind}" for kind in ("EXACT", "EXACT_INPUTS", "TOLERANCE")}
PROBLEMS = {
    LAUNCHES: Problem("planted-launches", NamedInts(M=6, K=16)),
    RETURNED: Problem("planted-returned", NamedInts(M=6, K=16)),
}
SUM = Problem("planted-sums", NamedInts(M=7, K=173))


def config(fault: int) -> NamedInts:
    return NamedInts(FAULT=fault, num_warps=4)


@pytest.fixture
def fresh_process() -> Iterator[None]:
    """Nothing is built, checked or launched yet."""
    for reference in (LAUNCHES, RETURNED, *SUMS.values()):
        names = load_spec(reference).launch.__globals__
        names["launches"].clear()
        names.get("stored", {}).clear()
    trial._edge_outcomes.clear()
    tensor_cache.clear()
    yield
    tensor_cache.clear()


def run(reference: str, fault: int, device: str, problem: Problem | None = None) -> Outcome:
    """Check a config; nothing is timed."""
    arm = KernelArm(reference, problem or PROBLEMS.get(reference, SUM), config(fault))
    return trial.checked_block(arm, device, 0, times=False)


def run_timed(
    reference: str, fault: int, device: str, launches: int = 9, rounds: tuple[int, ...] = (0,)
) -> tuple[Outcome, list[tuple[Callable[[], object], float | None]]]:
    """Check and time a config; also the arguments of the clock."""
    calls: list[tuple[Callable[[], object], float | None]] = []

    def block(launch: Callable[[], object], too_slow_us: float | None = None) -> Outcome:
        calls.append((launch, too_slow_us))
        for _ in range(launches):
            launch()
        return Outcome(Status.OK, 100.0, "", (100.0,))

    arm = KernelArm(reference, PROBLEMS.get(reference, SUM), config(fault))
    with mock.patch.object(timing, "block", block):
        outcomes = [trial.checked_block(arm, device, round) for round in rounds]
    return outcomes[-1], calls


def tensors(kind: str, device: str, **changed: Any) -> Tensors:
    reference = SUMS.get(kind) or f"{PLANTED / 'sums.py'}:{kind}"
    return checking.build(replace(load_spec(reference), **changed), Edge("", SUM), device)
