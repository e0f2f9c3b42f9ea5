"""Choose a config anew for one side of a comparison: as many configs and blocks as the other side gets.

A pick for a comparison, not for a table: one process, so near-ties fall either way, on both sides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait

from fp8tune.compare import side
from fp8tune.compare.side import Side
from fp8tune.measure import trial as measure
from fp8tune.measure.laboratory import Laboratory
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied, WorkerPool, usable_cores
from fp8tune.records import NamedInts, Problem
from fp8tune.stats import median

CONFIGS = 48
"""Tried on each problem, on either side: the default, what the table has, and a seeded choice of the rest."""
FINALISTS = 6
FINAL_ROUNDS = 2
TIMEOUT_S = 300.0


def retune(
    of: Side, reference: str, problem: Problem, listed: Sequence[NamedInts], laboratory: Laboratory
) -> NamedInts:
    """The fastest of what is listed of the side's own grid on a problem; the first of them where nothing runs."""
    worker = Worker()
    try:
        configs = list(dict.fromkeys(listed))[:CONFIGS]
        if laboratory.compiles:
            _compile(of, reference, problem, configs, laboratory.device.arch)
        times: dict[NamedInts, list[float]] = {config: [] for config in configs}
        for number in range(1 + FINAL_ROUNDS):
            ranked = sorted((median(found), place) for place, found in enumerate(times.values()) if found)
            for config in [configs[place] for _, place in ranked[:FINALISTS]] if number else configs:
                if (time_us := _time(worker, of, reference, problem, config, laboratory, number)) is not None:
                    times[config].append(time_us)
        return min(configs, key=lambda config: median(times[config]) if times[config] else float("inf"))
    finally:
        worker.kill()


def _time(
    worker: Worker, of: Side, reference: str, problem: Problem, config: NamedInts, laboratory: Laboratory, number: int
) -> float | None:
    """A checked block in microseconds; None for a config that fails."""
    timer, torch_device = laboratory.timer, laboratory.torch_device
    ask = measure.run_trial
    try:
        outcome = worker.call(TIMEOUT_S, side.within, of, ask, reference, problem, config, timer, torch_device, number)
    except (WorkerDied, RemoteError):
        return None
    return outcome.time_us


def _compile(of: Side, reference: str, problem: Problem, configs: Sequence[NamedInts], arch: str) -> None:
    """Fill the side's cache on all cores; what fails here fails again where it would be timed."""
    pool = WorkerPool(usable_cores())
    try:
        wait([pool.submit(TIMEOUT_S, side.within, of, side.code, reference, problem, c, arch) for c in configs])
    finally:
        pool.close()
