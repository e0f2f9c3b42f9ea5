"""CUDA graphs (HIP graphs on AMD) of launches, as programs replay them where the host is slower than the GPU.

Each launch of a graph has tensors of its own, and the cache is flushed before a replay. So a launch finds its inputs in
memory, as a step of decoding does whose weights fill the cache several times, and as a launch timed by events does:
rows of both timings differ in how launches start, not in the state of the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from fp8tune.errors import one_line
from fp8tune.replay.lazy import torch

COPIES_BYTES = 2 << 30  # of all tensors of a graph's launches


class CaptureError(Exception):
    """A launch cannot be captured."""


def capture(launches: Sequence[Callable[[], object]]) -> Any:
    """Return a CUDA graph of launches, in their order. They must have run before, so that nothing is loaded here.

    Raises CaptureError for a launch that waits for the GPU, or calls what a graph cannot hold.
    """
    # torch.cuda.graph also collects garbage and gives memory back, which takes longer than a block and slows it down
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for launch in launches:
                    launch()
            except BaseException:
                with contextlib.suppress(Exception):  # it fails as well, and says less
                    graph.capture_end()
                raise
            graph.capture_end()
    except Exception as error:
        raise CaptureError(one_line(error)) from error
    torch.cuda.current_stream().wait_stream(stream)
    return graph
