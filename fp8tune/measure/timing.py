"""The GPU's clock. A block is the only primitive: repeated timings of one launch in one process.

CUDA or HIP events through Triton's ``do_bench``, which flushes 256 MiB before each sample, on both vendors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from fp8tune.measure.steady import first_steady, is_steady
from fp8tune.records import Outcome, Status
from fp8tune.stats import block_value

WARMUP_MS = 2.0
MIN_REP_MS = 10.0
"""Block length, from the measuring protocol: ``rep = max(10 ms, 5 x estimate)``."""


@dataclass(frozen=True)
class Samples:
    """Samples of one block in microseconds, and the timer's tick as far as they show it."""

    samples_us: tuple[float, ...]
    tick_us: float | None
    stalled: int = 0
    """Blocks of the same launch that were timed before and scattered more (:mod:`fp8tune.measure.steady`)."""

    def outcome(self, process: str) -> Outcome:
        """As rows keep it, with the block's value. ``process`` names the worker process."""
        reason = f"the first stable of {1 + self.stalled} blocks" if self.stalled else ""
        value = block_value(self.samples_us)
        return Outcome(Status.OK, value, reason, self.samples_us, self.tick_us, process=process)


@dataclass(frozen=True)
class Prepared:
    """A launch with what must be done before each, which is not timed: ``do_bench`` knows no such step."""

    prepare: Callable[[], object]
    launch: Callable[[], object]

    def __call__(self) -> None:
        """Prepare and launch."""
        self.prepare()
        self.launch()


def block(launch: Callable[[], object], too_slow_us: float | None = None) -> Samples:
    """One block on the current device. The launch must have run once before, so that nothing compiles here.

    An estimate of two launches sets the block's length. If both take longer than ``too_slow_us``, the estimate is the
    whole block. A block that stalled is timed again (:mod:`fp8tune.measure.steady`).
    """
    samples_us, stalled = _estimate(launch), 0
    limit_us = float("inf") if too_slow_us is None else too_slow_us
    if min(samples_us) > limit_us:
        # Stalled, two estimates of 2,450 on an H100 passed for this; the blocks right after were as fast as ever.
        samples_us += _estimate(launch)
    if not (min(samples_us) > limit_us and is_steady(samples_us)):
        rep_ms = max(MIN_REP_MS, 5 * min(samples_us) / 1e3)
        measure = _bench_prepared if isinstance(launch, Prepared) else _do_bench
        samples_us, stalled = first_steady(lambda: measure(launch, rep_ms))
    return Samples(samples_us, tick(samples_us), stalled)


def _do_bench(launch: Callable[[], object], rep_ms: float) -> tuple[float, ...]:
    """Every sample in microseconds."""
    from triton.testing import do_bench

    return tuple(1e3 * sample for sample in do_bench(launch, warmup=WARMUP_MS, rep=rep_ms, return_mode="all"))


def _estimate(launch: Callable[[], object]) -> tuple[float, ...]:
    """Two launches in microseconds, each after a flush of the cache as ``do_bench`` does it.

    A first launch is not kept: it took over 3 % longer than the two others in half of 15,330 estimates on H100s and
    H200s, and over 30 % longer in one of twenty.
    """
    return _each(launch, 3)[0][1:]


def _bench_prepared(launch: Callable[[], object], rep_ms: float) -> tuple[float, ...]:
    """What ``do_bench`` does, with its counts: as many samples as fit into ``rep_ms``, flush and all."""
    ms_each = _each(launch, 5)[1] / 5
    _each(launch, max(1, int(WARMUP_MS / ms_each)))
    return _each(launch, max(1, int(rep_ms / ms_each)))[0]


def _each(launch: Callable[[], object], count: int) -> tuple[tuple[float, ...], float]:
    """Samples in microseconds of so many launches, each after a flush of the cache; and the milliseconds of it all.

    What prepares a launch leaves its outputs in the cache, so the flush comes after it, and the clock starts after the
    flush: as if the outputs had been prepared long before.
    """
    import torch
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    begun, (prepare, alone) = torch.cuda.Event(enable_timing=True), _parts(launch)
    begun.record()
    for start, end in pairs:
        prepare()
        driver.active.clear_cache(cache)
        start.record()
        alone()
        end.record()
    torch.cuda.synchronize()
    return tuple(1e3 * start.elapsed_time(end) for start, end in pairs), begun.elapsed_time(pairs[-1][1])


def _parts(launch: Callable[[], object]) -> tuple[Callable[[], object], Callable[[], object]]:
    """What is not timed and what is."""
    return (launch.prepare, launch.launch) if isinstance(launch, Prepared) else (lambda: None, launch)


def tick(samples_us: tuple[float, ...]) -> float | None:
    """The smallest step between two different samples: an upper bound of the timer's tick. None with one value."""
    values = sorted(set(samples_us))
    steps = [high - low for low, high in pairwise(values) if high - low > 1e-6]
    return min(steps, default=None)
