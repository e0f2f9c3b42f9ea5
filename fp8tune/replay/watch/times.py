"""GPU time of single launches, from events right around the launch, read when they are complete."""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

NEXT_SAMPLES = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024)
"""Launches of a signature that are timed. The first may be the one that tunes."""

_timing = threading.Lock()


class Samples:
    """Times of one signature."""

    def __init__(self) -> None:
        self._pending: list[tuple[Any, Any]] = []
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
        """Time the launch in this block, unless another thread is timing one or Triton has no hooks for it."""
        import torch

        knobs = sys.modules.get("triton.knobs")
        hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook) if knobs else ()
        if not hooks or not all(hasattr(item, "add") for item in hooks) or not _timing.acquire(blocking=False):
            yield
            return
        owner, events = threading.get_ident(), []

        def record(metadata: Any) -> None:
            if threading.get_ident() == owner:
                with contextlib.suppress(Exception):  # called by Triton's launcher: the launch goes on, untimed
                    event = torch.cuda.Event(enable_timing=True)
                    event.record()
                    events.append(event)

        def record_end(metadata: Any) -> None:  # a function of its own: hooks take each once
            record(metadata)

        try:
            hooks[0].add(record)
            hooks[1].add(record_end)
            yield
        finally:
            hooks[0].remove(record)
            hooks[1].remove(record_end)
            _timing.release()
        if len(events) >= 2:  # the last launch: a pre_hook may launch others before it
            self._pending.append((events[-2], events[-1]))


def is_on_gpu() -> bool:
    """Return True if this process uses a GPU through torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def is_capturing() -> bool:
    """Return True if launches go into a CUDA graph instead of to the GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and is_on_gpu() and bool(torch.cuda.is_current_stream_capturing())
