"""Blocks are timed by the GPU, however slow the host is; the queue is simulated, and real where there is a GPU."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from simulated_queue import CAPACITY, SimulatedQueue, busy_host

from fp8tune.measure.timing import HELD_LAUNCHES, SLOW_LAUNCHES, UNGATED, Prepared, block
from fp8tune.records import Status


def time_us(stream: SimulatedQueue, duration_us: float) -> float | None:
    return block(partial(stream.launch, duration_us), stream=stream).time_us


@pytest.mark.parametrize("duration_us", [1.0, 26.4, 300.0, 20_000.0])
def test_a_busy_host_does_not_change_a_time(duration_us: float) -> None:
    for host in (SimulatedQueue(), SimulatedQueue(host_us=900.0), SimulatedQueue(stall=busy_host())):
        assert time_us(host, duration_us) == pytest.approx(duration_us)


def test_without_the_gate_the_same_host_is_timed() -> None:
    """The planted slow host is slow enough to be seen."""
    assert (time_us(SimulatedQueue(stall=busy_host(), has_gate=False), 26.4) or 0) > 1.2 * 26.4


def test_a_launch_that_waits_for_the_gpu_is_timed_without_the_gate_and_says_so() -> None:
    stream = SimulatedQueue()

    def launch() -> None:
        stream.launch(50.0)
        stream.synchronize()

    outcome = block(launch, stream=stream)
    assert (outcome.status, outcome.reason, len(outcome.samples_us) > 10) == (Status.OK, UNGATED, True)
    assert outcome.time_us == pytest.approx(50.0, abs=10.0)


@pytest.mark.parametrize("launches", [1, 40, 700])
def test_the_queue_never_fills(launches: int) -> None:
    """A launch of many kernels is split into fewer launches a gate."""
    stream = SimulatedQueue()

    def launch() -> None:
        for _ in range(launches):
            stream.launch(1.0)

    outcome = block(launch, stream=stream)
    assert (outcome.reason, stream.most_waiting < CAPACITY) == ("", True)
    assert outcome.time_us == pytest.approx(launches)
    assert len(outcome.samples_us) <= 5 * HELD_LAUNCHES


def test_the_protocol_is_that_of_do_bench() -> None:
    """10 ms of flushed launches, at least five, after 2 ms of warm-up."""
    calls: list[float] = []

    def samples(duration_us: float) -> int:
        stream = SimulatedQueue(flush_us=90.0)
        calls.clear()
        return len(block(lambda: calls.append(stream.launch(duration_us) or duration_us), stream=stream).samples_us)

    assert samples(10.0) == 100
    assert len(calls) == 1 + 2 + 20 + 100  # one to load and measure the host, an estimate, the warm-up, the block
    assert samples(10_000.0) == 4  # do_bench counts flushes, too: 50 ms hold four


def test_a_step_that_prepares_a_launch_is_not_timed_and_comes_before_the_flush() -> None:
    order: list[str] = []

    class Queue(SimulatedQueue):
        def flush(self) -> None:
            order.append("flush")
            super().flush()

    def enqueue(name: str, duration_us: float) -> None:
        order.append(name)
        stream.launch(duration_us)

    stream = Queue()
    outcome = block(Prepared(partial(enqueue, "prepare", 500.0), partial(enqueue, "launch", 20.0)), stream=stream)
    assert set(map(round, outcome.samples_us)) == {20}
    assert order[-3:] == ["prepare", "flush", "launch"]


def test_a_launch_that_is_too_slow_gets_a_short_block() -> None:
    stream = SimulatedQueue()
    assert len(block(partial(stream.launch, 80.0), 70.0, stream).samples_us) == SLOW_LAUNCHES
    assert len(block(partial(stream.launch, 60.0), 70.0, stream).samples_us) > SLOW_LAUNCHES


@pytest.mark.parametrize(("host_us", "most"), [(5.0, 1.1), (15.0, 1.2), (50.0, 1.6)])
def test_the_gpu_does_not_wait_for_the_whole_queue(host_us: float, most: float) -> None:
    """A host that keeps ahead of the GPU costs a block a fifth of its launching time."""
    stream = SimulatedQueue(host_us=host_us)
    assert time_us(stream, 10.0) == pytest.approx(10.0)
    assert stream.now_us < most * 100 * 120  # 2 ms of warm-up, 10 ms of a block: 120 launches of 100 us each


def test_an_error_of_a_launch_opens_the_gate() -> None:
    stream, calls = SimulatedQueue(), iter(range(3))

    def launch() -> None:
        if next(calls) == 2:
            raise ValueError("the third launch")
        stream.launch(5.0)

    with pytest.raises(ValueError, match="the third launch"):
        block(launch, stream=stream)
    assert time_us(stream, 5.0) == pytest.approx(5.0)


def test_launches_of_a_graph_share_its_start_and_the_tick() -> None:
    stream, start_us, launch_us = SimulatedQueue(), 3.0, 2.0
    for launches in (1, 50):
        replay = Prepared(lambda: None, partial(stream.launch, start_us + launches * launch_us), launches)
        assert block(replay, stream=stream).time_us == pytest.approx(launch_us + start_us / launches)
    assert len(block(replay, 70.0, stream).samples_us) > SLOW_LAUNCHES  # its launches are short, not its replays


# On a GPU


def _copy(size_mib: int) -> partial[torch.Tensor]:
    x = torch.ones(size_mib << 18, device="cuda")
    return partial(torch.empty_like(x).copy_, x)


@pytest.mark.gpu
@pytest.mark.parametrize("size_mib", [4, 16, 64])
def test_on_a_gpu_a_slow_host_does_not_change_a_time(size_mib: int) -> None:
    copy = _copy(size_mib)

    def slowly() -> None:
        until = time.perf_counter() + 300e-6
        while time.perf_counter() < until:
            pass
        copy()

    fast, slow = block(copy), block(slowly)
    assert fast.reason == slow.reason == ""
    assert slow.time_us == pytest.approx(fast.time_us, rel=0.05, abs=0.6)


@pytest.mark.gpu
def test_on_a_gpu_times_are_those_of_do_bench() -> None:
    from triton.testing import do_bench

    copy = _copy(256)
    theirs_us = 1e3 * do_bench(copy, warmup=2, rep=20, return_mode="median")
    assert block(copy).time_us == pytest.approx(theirs_us, rel=0.03)


@pytest.mark.gpu
def test_on_a_gpu_a_launch_that_waits_is_timed_without_the_gate() -> None:
    copy = _copy(16)

    def launch() -> None:
        copy()
        torch.cuda.synchronize()

    begun = time.monotonic()
    assert block(launch).reason == UNGATED
    assert time.monotonic() - begun < 5
