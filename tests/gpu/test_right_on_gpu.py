"""On a GPU: the three kinds of right with a real clock, a race that shows once in fifty, outputs that are prepared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from places import PLANTED, ROOT

from fp8tune.measure import tensor_cache, timing
from fp8tune.measure import trial as measure
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.comparing import EXACT
from fp8tune.measure.timing import Prepared
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune.stats.means import trimmed_mean

pytestmark = pytest.mark.gpu

PROBLEM = Problem("planted-sums", NamedInts(M=509, K=173))
KINDS = ("EXACT", "EXACT_INPUTS", "TOLERANCE")


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    for kind in KINDS:
        load_spec(f"{PLANTED / 'sums.py'}:{kind}").launch.__globals__["launches"].clear()
    measure._edge_outcomes.clear()
    tensor_cache.clear()
    yield
    tensor_cache.clear()


def trial(kind: str, fault: int) -> Outcome:
    arm = KernelArm(f"{PLANTED / 'sums.py'}:{kind}", PROBLEM, NamedInts(FAULT=fault, num_warps=4))
    return measure.checked_block(arm, "cuda", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_race_that_shows_once_in_fifty_is_found(kind: str) -> None:
    outcome = trial(kind, 9)
    assert outcome.status is Status.WRONG
    assert "output 0: 1 of 509 elements" in outcome.reason
    assert trial(kind, 0).time_us


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_whose_output_is_prepared_is_timed_without_that(kind: str) -> None:
    assert trial(f"PREPARED_{kind}", 3).time_us
    assert trial(kind, 3).status is Status.WRONG


def test_a_softmax_is_timed_and_no_config_of_it_races() -> None:
    reference = f"{ROOT / 'docs' / 'examples' / 'softmax_spec.py'}:SPEC"
    spec = load_spec(reference)
    problem = Problem("softmax", next(iter(spec.problems({"M": 1024, "K": 4096, "R": 1024, "C": 4096}))))
    for rows in spec.axes["ROWS"]:
        outcome = measure.checked_block(KernelArm(reference, problem, NamedInts(ROWS=rows, num_warps=4)), "cuda", 0)
        assert outcome.status is Status.OK, outcome.reason
        assert outcome.time_us


def test_a_prepared_launch_takes_as_long_as_do_bench_says() -> None:
    """However long its preparation takes."""
    x = torch.randn(64 << 20, device="cuda")
    out = torch.empty_like(x)

    def prepare() -> None:
        for _ in range(3):
            out.zero_()

    def launch() -> None:
        torch.mul(x, 2, out=out)

    alone = trimmed_mean(timing.block(launch).samples_us)
    prepared = trimmed_mean(timing.block(Prepared(prepare, launch)).samples_us)
    assert prepared == pytest.approx(alone, rel=0.03)


def test_a_comparison_takes_less_memory_than_the_output() -> None:
    """Counting took 8 bytes an element, so the weights of 128 experts did not fit an H100."""
    right = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    output = right.clone()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert EXACT.difference(output, right) is None
    output[5] = 1
    assert "1 of 268435456 elements differ, first at (5,)" in str(EXACT.difference(output, right))
    assert torch.cuda.max_memory_allocated() - before <= right.nbytes
