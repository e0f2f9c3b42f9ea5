"""Compiling before anything is timed: contenders run once each, in parallel, in processes that are thrown away.

What they compile is on disk for the worker that times. torchao's autotuners alone would take minutes one by one: a
kernel has 36 configs, which Triton compiles anew where the number of groups is 1, a multiple of 16, or another.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from fp8tune.measure.arms import Arm
from fp8tune.measure.engine import Backend
from fp8tune.measure.worker import RemoteError, WorkerDied, usable_cores
from fp8tune.records import Progress

WARMUP_MS, TUNING_MS = 5, 25
"""Of an autotuner, for each of its configs."""


class Compiled(Progress):
    """An arm has run."""


def in_parallel(backend: Backend, arms: Sequence[Arm], workers: int) -> Iterator[Compiled]:
    """Run each arm once. What fails here fails again where it is timed; where no kernels run nothing is said."""
    begun = time.monotonic()
    fresh = [backend.worker() for _ in range(min(workers, usable_cores()))]
    idle = deque(fresh)

    def run(arm: Arm) -> bool:
        worker = idle.pop()  # as many as there are threads
        try:
            return worker.run(warm_up, arm) is not None
        except (WorkerDied, RemoteError):
            return True
        finally:
            idle.append(worker)

    threads = ThreadPoolExecutor(len(fresh), thread_name_prefix="fp8tune-warming")
    try:
        running = [threads.submit(run, arm) for arm in arms]
        for done, future in enumerate(as_completed(running), start=1):
            if future.result():
                yield Compiled(done, len(running), time.monotonic() - begun)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in fresh:
            worker.close()


def warm_up(arm: Arm) -> bool:
    """Build an arm and launch it once, whatever comes of it, in a process that is thrown away.

    An autotuner launches each of its configs once here, and measures nothing: what it picks is its own, later.
    """
    import torch
    from triton.runtime import driver

    with contextlib.suppress(Exception):  # it is a reason where it is timed
        arm.build("cuda")
        driver.active.get_benchmarker = lambda: _one_launch
        arm.launcher("cuda")()
        torch.cuda.synchronize()
    return True


def tune_in_short_blocks() -> None:
    """Have Triton's autotuners time each config for :data:`TUNING_MS` in this process.

    With their 100 ms torchao's 36 configs on 36 problems would take minutes. A block of ours has 10 ms.
    """
    import torch
    from triton.runtime import driver
    from triton.testing import do_bench

    if torch.cuda.is_available():
        driver.active.get_benchmarker = lambda: functools.partial(do_bench, warmup=WARMUP_MS, rep=TUNING_MS)


def _one_launch(launch: Callable[[], Any], *_: object, **__: object) -> list[float]:
    launch()
    return [1.0, 1.0, 1.0]
