"""The true times of a course's configs: a long interleaved timing of all of them, in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.contestants import compile_in_threads
from benchmarks.course import Course
from fp8tune.measure.worker import usable_cores
from fp8tune.records import NamedInts
from fp8tune.stats import median

SAMPLES = 5
"""Timed launches of a config when its turn comes, after one that is not timed."""


def interleaved_times_us(course: Course, rounds: int, seed: int = 0) -> dict[NamedInts, list[float]]:
    """Microseconds of each config, one value a round; a config that cannot be launched is left out.

    A round is a permutation of all configs, so that drift and neighbours hit each alike. A value is the median of
    :data:`SAMPLES` launches, each after a flush of the L2 cache as ``do_bench`` does it.
    """
    compile_in_threads(course, usable_cores())
    times_us: dict[NamedInts, list[float]] = {config: [] for config in course.configs if _launches(course, config)}
    order = list(times_us)
    permuted = random.Random(seed)
    for _ in range(rounds):
        permuted.shuffle(order)
        for config, time_us in _one_round(course, order).items():
            times_us[config].append(time_us)
    return times_us


def _launches(course: Course, config: NamedInts) -> bool:
    from triton.runtime.errors import OutOfResources

    try:
        course.launch(config)
    except OutOfResources:
        return False
    return True


def _one_round(course: Course, order: Sequence[NamedInts]) -> dict[NamedInts, float]:
    """Each config once, in this order. The host waits only at the end: the GPU never waits for Python."""
    import torch
    import triton

    driver = triton.runtime.driver.active
    flush = driver.get_empty_cache_for_benchmark()
    events: dict[NamedInts, list[tuple[Any, Any]]] = {config: [] for config in order}
    for config, pairs in events.items():
        course.launch(config)
        for _ in range(SAMPLES):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            driver.clear_cache(flush)
            start.record()
            course.launch(config)
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize()
    return {config: 1e3 * median(start.elapsed_time(end) for start, end in pairs) for config, pairs in events.items()}
