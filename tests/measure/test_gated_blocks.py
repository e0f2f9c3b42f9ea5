"""Blocks are timed by the GPU, however slow the host is; the queue is simulated, and real where there is a GPU."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from simulated_queue import CAPACITY, SimulatedQueue, busy_host

from fp8tune.measure.timing import HELD_LAUNCHES, SLOW_LAUNCHES, UNGATED, Prepared, block
from fp8tune.records import Status
from fp8tune.stats.means import trimmed_mean


def value(stream: SimulatedQueue, duration_us: float) -> float:
    return trimmed_mean(block(partial(stream.launch, duration_us), stream=stream).samples_us)


@pytest.mark.parametrize("duration_us", [1.0, 26.4, 300.0, 20_000.0])
def test_a_busy_host_does_not_change_a_time(duration_us: float) -> None:
    assert value(SimulatedQueue(), duration_us) == pytest.approx(duration_us)
    assert value(SimulatedQueue(host_us=900.0), duration_us) == pytest.approx(duration_us)
    assert value(SimulatedQueue(stall=busy_host()), duration_us) == pytest.approx(duration_us)


def test_without_the_gate_the_same_host_is_timed() -> None:
    """The planted slow host is slow enough to be seen."""
    stream = SimulatedQueue(stall=busy_host(), has_gate=False)
    assert value(stream, 26.4) > 1.2 * 26.4


def test_a_launch_that_waits_for_the_gpu_is_timed_without_the_gate_and_says_so() -> None:
    stream = SimulatedQueue()

    def launch() -> None:
        stream.launch(50.0)
        stream.synchronize()

    samples = block(launch, stream=stream)
    assert len(samples.samples_us) > 10
    assert samples.time_us == pytest.approx(50.0, abs=10.0)
    assert (samples.status, samples.reason) == (Status.OK, UNGATED)


@pytest.mark.parametrize("launches", [1, 40, 700])
def test_the_queue_never_fills(launches: int) -> None:
    """A launch of many kernels is split into fewer launches a gate."""
    stream = SimulatedQueue()

    def launch() -> None:
        for _ in range(launches):
            stream.launch(1.0)

    samples = block(launch, stream=stream)
    assert not samples.reason
    assert stream.most_waiting < CAPACITY
    assert trimmed_mean(samples.samples_us) == pytest.approx(launches)
    assert len(samples.samples_us) <= 5 * HELD_LAUNCHES


def test_the_protocol_is_that_of_do_bench() -> None:
    """10 ms of flushed launches, at least five, after 2 ms of warm-up."""
    calls: list[str] = []

    def launched(stream: SimulatedQueue, duration_us: float) -> int:
        calls.clear()

        def launch() -> None:
            calls.append("launch")
            stream.launch(duration_us)

        return len(block(launch, stream=stream).samples_us)

    stream = SimulatedQueue(flush_us=90.0)
    assert launched(stream, 10.0) == 100
    assert len(calls) == 1 + 2 + 20 + 100  # one to load and measure the host, an estimate, the warm-up, the block
    assert launched(stream, 10_000.0) == 4  # do_bench counts flushes, too: 50 ms hold four


def test_what_prepares_a_launch_is_not_timed() -> None:
    stream = SimulatedQueue()
    order: list[str] = []
    flush = stream.flush

    def flushed() -> None:
        order.append("flush")
        flush()

    stream.flush = flushed  # type: ignore[method-assign]

    def prepare() -> None:
        order.append("prepare")
        stream.launch(500.0)

    def launch() -> None:
        order.append("launch")
        stream.launch(20.0)

    samples = block(Prepared(prepare, launch), stream=stream)
    assert set(map(round, samples.samples_us)) == {20}
    assert order[-3:] == ["prepare", "flush", "launch"]


def test_a_launch_that_is_too_slow_gets_a_short_block() -> None:
    stream = SimulatedQueue()
    assert len(block(partial(stream.launch, 80.0), 70.0, stream).samples_us) == SLOW_LAUNCHES
    assert len(block(partial(stream.launch, 60.0), 70.0, stream).samples_us) > SLOW_LAUNCHES


def test_the_gpu_does_not_wait_for_the_whole_queue() -> None:
    """A host that keeps ahead of the GPU costs a block a fifth of its launching time."""

    def block_us(host_us: float) -> float:
        stream = SimulatedQueue(host_us=host_us)
        assert value(stream, 10.0) == pytest.approx(10.0)
        return stream.now_us

    launches = 120  # 2 ms of warm-up, 10 ms of a block: 100 us each
    assert block_us(5.0) < 1.1 * 100 * launches
    assert block_us(15.0) < 1.2 * 100 * launches
    assert block_us(50.0) < 1.6 * 100 * launches


def test_what_a_launch_raises_opens_the_gate() -> None:
    stream = SimulatedQueue()
    calls = 0

    def launch() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("the third launch")
        stream.launch(5.0)

    with pytest.raises(ValueError, match="the third launch"):
        block(launch, stream=stream)
    assert value(stream, 5.0) == pytest.approx(5.0)


def test_launches_of_a_graph_share_its_start_and_the_tick() -> None:
    stream, start_us, launch_us = SimulatedQueue(), 3.0, 2.0
    for launches in (1, 50):
        replay = Prepared(lambda: None, partial(stream.launch, start_us + launches * launch_us), launches)
        assert trimmed_mean(block(replay, stream=stream).samples_us) == pytest.approx(launch_us + start_us / launches)
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
    assert not fast.reason
    assert not slow.reason
    assert trimmed_mean(slow.samples_us) == pytest.approx(trimmed_mean(fast.samples_us), rel=0.05, abs=0.6)


@pytest.mark.gpu
def test_on_a_gpu_times_are_those_of_do_bench() -> None:
    from triton.testing import do_bench

    copy = _copy(256)
    theirs_us = 1e3 * do_bench(copy, warmup=2, rep=20, return_mode="median")
    assert trimmed_mean(block(copy).samples_us) == pytest.approx(theirs_us, rel=0.03)


@pytest.mark.gpu
def test_on_a_gpu_a_launch_that_waits_is_timed_without_the_gate() -> None:
    copy = _copy(16)

    def launch() -> None:
        copy()
        torch.cuda.synchronize()

    begun = time.monotonic()
    samples = block(launch)
    assert samples.reason
    assert time.monotonic() - begun < 5
