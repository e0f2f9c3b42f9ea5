"""Blocks, the only primitive of timing: repeated launches of one function in one process, by the GPU's own clock.

The protocol is that of ``triton.testing.do_bench``: the same flush of the cache before each launch, events around it,
the same warm-up and length. What differs is that each launch is queued before the GPU comes to it
(:mod:`fp8tune.measure.gate`). Otherwise a busy host adds its own time: with compilers on all cores, 44 of 204 configs
of a matmul on an H200 were over 20 % too slow, the worst 4.9 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from fp8tune.records import Outcome, Status
from fp8tune.stats.means import trimmed_mean

WARMUP_MS = 2.0
MIN_REP_MS = 10.0
"""A block takes ``max(10 ms, 5 launches)``, flushes included; of the host's time, where that is longer."""

HELD_LAUNCHES = 150
HELD_HOST_US = 4000.0
"""Limits on what waits behind one gate. A queue takes about 1,024 operations before the host has to wait: 150 launches
are 600 with their flushes and events, and each kernel of a larger launch is taken to need 5 us of host time or more."""

LEAST_LEAD = 0.2
SAFETY = 0.7
"""The gate opens once so much is queued that a GPU that takes ``SAFETY`` of its time does not catch up with the host,
at least a fifth. Waiting for the whole queue instead made a sweep of short kernels a sixth longer."""

SLOW_LAUNCHES = 5
"""The whole block of a config that is too slow to be the pick. Some kernels have two speeds: of two launches, 10 of
1,548 configs of ``colwise`` on an H200 differed by more than 5 % from sweep to sweep."""

UNGATED = "the launch waits for the GPU, so the host's time counts too"


class Event(Protocol):
    """A timing event as torch has it."""

    def record(self) -> None:
        """Queue the event."""

    def query(self) -> bool:
        """Return True if the GPU has come past it."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds to another event."""


class Stream(Protocol):
    """The part of a GPU that timing needs: :class:`fp8tune.measure.gate.GpuStream`, or a simulated queue in tests."""

    def clock(self) -> float:
        """Return the host's time in seconds."""

    def event(self) -> Event:
        """Return a new event."""

    def flush(self) -> None:
        """Queue a flush of the cache."""

    def close_gate(self) -> None:
        """Hold back everything that is queued from now on."""

    def open_gate(self) -> None:
        """Let it run."""

    def synchronize(self) -> None:
        """Wait until the queue is empty."""


@dataclass(frozen=True)
class Samples:
    """The samples of one block in microseconds."""

    samples_us: tuple[float, ...]
    tick_us: float | None
    """The timer's tick as far as the samples show it."""
    is_gated: bool = True
    """False if the GPU had to wait for the host in any case, because the launch itself waits for the GPU."""

    def outcome(self, process: str) -> Outcome:
        """Return the outcome that rows store. ``process`` names the worker process."""
        value = trimmed_mean(self.samples_us)
        reason = "" if self.is_gated else UNGATED
        return Outcome(Status.OK, value, reason, self.samples_us, self.tick_us, process=process)


@dataclass(frozen=True)
class Prepared:
    """A launch with a step before it that is not timed."""

    prepare: Callable[[], object]
    launch: Callable[[], object]

    def __call__(self) -> None:
        """Prepare and launch."""
        self.prepare()
        self.launch()


def block(launch: Callable[[], object], too_slow_us: float | None = None, stream: Stream | None = None) -> Samples:
    """Time one block on the current device. The launch must have run once before, so that nothing compiles here.

    Args:
        launch: Enqueues the work once.
        too_slow_us: If two launches both take longer, a few more are the whole block.
        stream: A stand-in for the GPU's stream.
    """
    queue = _Queue(launch, stream or _gpu_stream())
    timed = queue.time(2)
    fastest_us = min(timed.samples_us)
    if too_slow_us is not None and fastest_us > too_slow_us:
        timed = queue.time(SLOW_LAUNCHES)
    else:
        rep_ms = max(MIN_REP_MS, 5 * fastest_us / 1e3)
        each_us = max(timed.gpu_us, timed.host_us)  # a slow host gets fewer launches, not more time
        warmup, repeats = (max(1, int(1e3 * ms / each_us)) for ms in (WARMUP_MS, rep_ms))
        timed = queue.time(repeats, warmup)
    return Samples(timed.samples_us, tick(timed.samples_us), queue.is_gated)


@dataclass(frozen=True)
class _Timed:
    """Timed launches of one pass."""

    samples_us: tuple[float, ...]
    gpu_us: float
    """Per launch with flush and events."""
    host_us: float
    """Per launch to queue them."""

    @property
    def lead(self) -> float:
        """The share of a queue that keeps the GPU busy while the host queues the rest."""
        return min(1.0, max(LEAST_LEAD, 1 - SAFETY * self.gpu_us / self.host_us))


@dataclass(frozen=True)
class _Attempt:
    """A way to keep the GPU from waiting for the host."""

    launches: int
    """At most so many are queued at a time."""
    lead: float
    """The gate opens after this share of them; 0 for no gate at all."""


class _Queue:
    """One launch in front of one stream."""

    def __init__(self, launch: Callable[[], object], stream: Stream) -> None:
        prepared = launch if isinstance(launch, Prepared) else Prepared(lambda: None, launch)
        self._prepare, self._launch = prepared.prepare, prepared.launch
        self._stream = stream
        self._most = most = self._most_launches()
        self._attempts = [_Attempt(most, 1.0), _Attempt(max(1, most // 4), 1.0), _Attempt(most, 0.0)]
        """The next is taken once the GPU has caught up with the host, which a full queue makes it do as well."""

    @property
    def is_gated(self) -> bool:
        """True if the GPU never waited for the host."""
        return self._attempts[0].lead > 0

    def time(self, count: int, warmup: int = 0) -> _Timed:
        """Time so many launches after others that are not timed."""
        while (timed := self._time(count, warmup)) is None:
            del self._attempts[0]
        if self._attempts[0].lead == 1.0 and timed.lead < 1.0:
            self._attempts.insert(0, replace(self._attempts[0], lead=timed.lead))
        return timed

    def _most_launches(self) -> int:
        """Return how many launches fit behind one gate, by the host time of one that also loads everything."""
        stream = self._stream
        stream.flush()
        stream.synchronize()
        begun = stream.clock()
        self._prepare()
        self._launch()
        host_us = 1e6 * (stream.clock() - begun)
        stream.synchronize()
        return max(1, min(HELD_LAUNCHES, int(HELD_HOST_US / max(host_us, 1.0))))

    def _time(self, count: int, warmup: int) -> _Timed | None:
        """Time launches; None if the GPU had to wait for the host."""
        stream, attempt = self._stream, self._attempts[0]
        samples_us, gpu_ms, host_s = list[float](), 0.0, 0.0
        for _ in range(warmup):
            self._prepare()
            self._launch()
        while len(samples_us) < count:
            size = min(attempt.launches, count - len(samples_us))
            begun, events = stream.event(), [(stream.event(), stream.event()) for _ in range(size)]
            lead, ran_dry = math.ceil(attempt.lead * size), False
            if lead:
                stream.close_gate()
            started = stream.clock()
            try:
                begun.record()
                for number, (start, end) in enumerate(events, 1):
                    self._prepare()  # it leaves outputs in the cache, so the flush comes after it
                    stream.flush()
                    start.record()
                    self._launch()
                    end.record()
                    ran_dry = lead > 0 and start.query()
                    if ran_dry:
                        break
                    if number == lead:
                        stream.open_gate()
            finally:
                stream.open_gate()
            host_s += stream.clock() - started
            stream.synchronize()
            if ran_dry:
                return None
            samples_us += [1e3 * start.elapsed_time(end) for start, end in events]
            gpu_ms += begun.elapsed_time(events[-1][1])
        return _Timed(tuple(samples_us), 1e3 * gpu_ms / count, 1e6 * host_s / count)


def _gpu_stream() -> Stream:
    from fp8tune.measure.gate import GpuStream  # it imports torch

    return GpuStream()


def tick(samples_us: tuple[float, ...]) -> float | None:
    """Return the smallest step between two samples, an upper bound of the timer's tick; None if all are equal."""
    values = sorted(set(samples_us))
    steps = [high - low for low, high in pairwise(values) if high - low > 1e-6]
    return min(steps, default=None)
