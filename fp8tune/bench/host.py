"""What a call costs the host: the time until it returns, while the device still works."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

HOST_BATCHES = 10
HOST_CALLS = 100
"""Calls between two waits for the device: few enough that its queue never fills and makes the host wait."""


def host_us(call: Callable[[], Any]) -> float:
    """The median host time of a call in microseconds, the device's queue drained between batches."""
    import torch

    def drain() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    call()  # compiles, tunes, and fills caches
    times_s: list[float] = []
    for _ in range(HOST_BATCHES):
        drain()
        for _ in range(HOST_CALLS):
            begun = time.perf_counter()
            call()
            times_s.append(time.perf_counter() - begun)
    drain()
    return 1e6 * median(times_s)
