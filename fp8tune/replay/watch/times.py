"""GPU time of single launches, from events right around the launch, read when they are complete."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

NEXT_SAMPLES = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024)
"""Launches of a signature that are timed. The first may be the one that tunes."""


class Samples:
    """Times of one signature."""

    def __init__(self) -> None:
        self._pending: list[Any] = []
        self._us: list[float] = []

    def median_us(self) -> float | None:
        """Return the median of the samples that were read; None where there are none."""
        return statistics.median(self._us) if self._us else None

    def read(self, wait_s: float = 0.0) -> None:
        """Take in the samples that are complete. Called by threads that launch, never while a graph is captured."""
        deadline = time.monotonic() + wait_s
        pending, self._pending = self._pending, []
        for start, end in pending:
            while not (is_complete := end.query()) and time.monotonic() < deadline:
                time.sleep(0.001)
            if is_complete:
                self._us.append(1000 * start.elapsed_time(end))
            else:
                self._pending.append((start, end))

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Time the launch in this block by hooks of Triton's launcher: without them the host's work would count."""
        events: list[Any] = []

        def record(metadata: Any) -> None:
            with contextlib.suppress(Exception):  # the launch goes on, untimed
                events.append(sys.modules["torch"].cuda.Event(enable_timing=True))
                events[-1].record()

        runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
        hooks: list[Any] = [getattr(runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook")]
        hooks = [hook for hook in hooks if hasattr(hook, "add")]  # older ones are single functions
        try:
            for hook in hooks:
                hook.add(record)
            yield
        finally:
            for hook in hooks:
                hook.remove(record)
        if len(events) == 2:  # more: a pre_hook or another thread launched too
            self._pending.append(events)


def is_on_gpu() -> bool:
    """Return True if this process uses a GPU through torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def is_capturing() -> bool:
    """Return True if launches go into a CUDA graph instead of to the GPU."""
    return is_on_gpu() and bool(sys.modules["torch"].cuda.is_current_stream_capturing())
