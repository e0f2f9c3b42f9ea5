"""A GPU's stream on a simulated host: work is queued at the host's pace and runs at the GPU's. Times in us."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

CAPACITY = 1024  # operations that wait before the host has to wait as well
GATE_US = 400_000.0  # A gate that nobody opens opens by itself after this time


@dataclass
class Event:
    stream: SimulatedQueue
    at_us: float | None = None

    def record(self) -> None:
        self.at_us = None
        self.stream.enqueue(0.0, self)

    def query(self) -> bool:
        return self.stream.has_gate and self.at_us is not None and self.at_us <= self.stream.now_us

    def elapsed_time(self, end: Event) -> float:
        assert self.at_us is not None
        assert end.at_us is not None
        return (end.at_us - self.at_us) / 1e3


@dataclass
class SimulatedQueue:
    """``host_us``: what the host needs to queue one operation; ``stall`` adds to it, drawn for each."""

    host_us: float = 4.0
    flush_us: float = 90.0
    stall: Callable[[], float] = lambda: 0.0
    has_gate: bool = True  # false: the GPU runs whatever is queued at once, and nobody notices
    now_us: float = 0.0  # the host's clock
    most_waiting: int = 0
    _gpu_us: float = 0.0  # when the GPU has done all that it could begin
    _waiting: list[tuple[float, float, Event | None]] = field(default_factory=list)
    """(queued at, duration, event) of what is behind the gate."""
    _closed_us: float | None = None  # when the gate was closed

    def clock(self) -> float:
        return self.now_us / 1e6

    def event(self) -> Event:
        return Event(self)

    def flush(self) -> None:
        self.enqueue(self.flush_us)

    def launch(self, duration_us: float) -> None:
        self.enqueue(duration_us)

    def enqueue(self, duration_us: float, event: Event | None = None) -> None:
        self.now_us += self.host_us + self.stall()
        if len(self._waiting) >= CAPACITY:
            self._wait_for_the_gate()
        self._waiting.append((self.now_us, duration_us, event))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        self._run()

    def close_gate(self) -> None:
        assert self._closed_us is None
        if self.has_gate:
            self._closed_us = max(self.now_us, self._gpu_us)

    def open_gate(self) -> None:
        if self._closed_us is not None:
            self._gpu_us = max(self._closed_us, min(self.now_us, self._closed_us + GATE_US))
            self._closed_us = None
            self._run()

    def synchronize(self) -> None:
        self._wait_for_the_gate()
        self.now_us = max(self.now_us, self._gpu_us)

    def _wait_for_the_gate(self) -> None:
        if self._closed_us is not None:
            self.now_us = max(self.now_us, self._closed_us + GATE_US)
            self.open_gate()

    def _run(self) -> None:
        if self._closed_us is not None:
            return
        for queued_us, duration_us, event in self._waiting:
            self._gpu_us = max(self._gpu_us, queued_us) + duration_us
            if event is not None:
                event.at_us = self._gpu_us
        self._waiting.clear()


def busy_host(seed: int = 1) -> Callable[[], float]:
    """Return what a host with compilers on all cores adds: now and then it runs something else for a while."""
    draw = random.Random(seed)
    return lambda: draw.choice((0.0, 5.0, 40.0, 250.0))
