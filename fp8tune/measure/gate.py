"""The GPU as a block of timings sees it: a stream whose work can be held back until enough of it is queued.

While the host launches, the GPU waits in front of a *gate*: a kernel of one thread that polls a word in pinned host
memory, which the host sets to open it. nvbench calls the same thing a blocking kernel.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

# A poll takes 1.2 us on an H200, so the gate opens by itself after half a second. A launch that waits for the GPU would
# otherwise never end.
POLLS = 400_000


@triton.jit(do_not_specialize=["polls"])  # type: ignore[untyped-decorator]
def gate_kernel(is_open_ptr: tl.tensor, polls: tl.tensor) -> None:
    """Wait until the host sets the word, for at most so many polls."""
    polled = 0
    while (polled < polls) & (tl.load(is_open_ptr, volatile=True) == 0):
        polled += 1


class GpuStream:
    """The current stream of the current device, CUDA or HIP."""

    clock = staticmethod(time.perf_counter)
    synchronize = staticmethod(torch.cuda.synchronize)

    def __init__(self) -> None:
        self._cache = driver.active.get_empty_cache_for_benchmark()
        self._word, self._is_open = _gate()

    def event(self) -> Any:
        """Return a new timing event."""
        return torch.cuda.Event(enable_timing=True)

    def flush(self) -> None:
        """Queue what ``do_bench`` queues before each launch: a write of 256 MiB, which empties the cache."""
        driver.active.clear_cache(self._cache)

    def close_gate(self) -> None:
        """Hold back everything that is queued from now on. No gate before this one may be waiting."""
        self._is_open[0] = 0
        gate_kernel[(1,)](self._word, POLLS, num_warps=1)

    def open_gate(self) -> None:
        """Let it run."""
        self._is_open[0] = 1


@functools.cache
def _gate() -> tuple[torch.Tensor, Any]:
    """Return the word of this process as the device and as the host see it, with the kernel loaded."""
    word = torch.ones(1, dtype=torch.int32, pin_memory=True)
    gate_kernel[(1,)](word, 1, num_warps=1)
    torch.cuda.synchronize()
    return word, word.numpy()
