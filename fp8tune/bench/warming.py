"""Compiling before anything is timed: contenders run once each, in parallel, in processes that are thrown away.

What they compile is on disk for the worker that times. torchao's autotuners alone would take minutes one after the
other: its kernel of gradients and activations has 36 configs, and Triton compiles them anew where the number of groups
is 1, a multiple of 16, or another.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from typing import Any

from fp8tune.measure.worker import WorkerPool, usable_cores
from fp8tune.records import Progress

WARMUP_MS, TUNING_MS = 5, 25
"""Of an autotuner, for each of its configs."""

Cell = tuple[Callable[..., object], tuple[object, ...]]
"""A function of a worker, which calls :func:`run_once`, and its arguments."""


class Compiled(Progress):
    """A cell has run."""


def in_parallel(cells: Iterable[Cell], workers: int, timeout_s: float) -> Iterator[Compiled]:
    """Run all cells, each in at most ``timeout_s``. What fails here fails again where it is timed."""
    begun = time.monotonic()
    pool = WorkerPool(min(workers, usable_cores()))
    try:
        running = [pool.submit(timeout_s, function, *arguments) for function, arguments in cells]
        for done, _ in enumerate(as_completed(running), start=1):
            yield Compiled(done, len(running), time.monotonic() - begun)
    finally:
        pool.close()


def run_once(make: Callable[[], Callable[[], Any]]) -> None:
    """Make a launch and run it, whatever comes of it, in a process that is thrown away.

    An autotuner launches each of its configs once here, and measures nothing: what it picks is its own, later.
    """
    import torch
    from triton.runtime import driver

    with contextlib.suppress(Exception):  # it is a reason where it is timed
        driver.active.get_benchmarker = lambda: _one_launch
        make()()
        torch.cuda.synchronize()


def tune_in_short_blocks() -> None:
    """Have Triton's autotuners time each config for :data:`TUNING_MS` in this process.

    By default they take 100 ms, as if there was one problem: torchao's 36 configs on 36 problems are minutes. A block
    of ours has 10 ms.
    """
    import torch
    from triton.runtime import driver
    from triton.testing import do_bench

    if torch.cuda.is_available():
        driver.active.get_benchmarker = lambda: functools.partial(do_bench, warmup=WARMUP_MS, rep=TUNING_MS)


def _one_launch(launch: Callable[[], Any], *_: object, **__: object) -> list[float]:
    launch()
    return [1.0, 1.0, 1.0]
