"""What a device and its host are like with nothing to do: measured in the worker that owns the GPU, for calibrating."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8tune.measure import trial as measure
from fp8tune.measure.clock import Timer, Trial
from fp8tune.measure.host import host_us
from fp8tune.measure.timing import make_timer
from fp8tune.records import NamedInts, Problem
from fp8tune.stats import block_value


def idle_values(
    reference: str, problem: Problem, config: NamedInts, timer_name: str, torch_device: str
) -> dict[str, float]:
    """Name -> value, the unit in the name: an empty kernel, and on a GPU the host, the cache's flush and the copy.

    The host's time is that of launching ``config`` on ``problem``.
    """
    timer = make_timer(timer_name)
    if not timer.runs_kernels:
        return {"empty_kernel_us": _block_us(timer, "empty kernel", lambda: None)}
    import torch
    from triton.runtime import driver

    empty_kernel, pointer = _empty_kernel(), torch.zeros(1, device=torch_device)
    cache = driver.active.get_empty_cache_for_benchmark()
    bench = measure.unchecked_bench(reference, problem, torch_device)
    return {
        "empty_kernel_us": _block_us(timer, "empty kernel", lambda: empty_kernel[(1,)](pointer)),
        "host_enqueue_us": host_us(lambda: bench.launch(config)),
        "cache_flush_us": _block_us(timer, "flush", lambda: driver.active.clear_cache(cache)),
        "copy_ceiling_gb_per_s": measure.copy_ceiling_gb_per_s(),
    }


def _empty_kernel() -> Any:
    import triton

    @triton.jit
    def empty(pointer):  # type: ignore[no-untyped-def]  # (1,)
        pass

    return empty


def _block_us(timer: Timer, name: str, launch: Callable[[], None]) -> float:
    block = timer.block(launch, Trial(name, 0, 0))
    if block is None:
        raise ValueError(f"{name} was not timed: this clock does not time")
    return block_value(block.samples_us)
