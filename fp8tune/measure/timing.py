"""The clocks: one protocol, three timers. A block is the only primitive: repeated timings of one config in one process.

=============  ===================================================================================================
``do_bench``   the GPU's: ``triton.testing.do_bench`` with a flushed L2 and every sample kept
``none``       the interpreter's: bytes are checked, nothing is timed, because its times say nothing of a GPU
``simulated``  seeded, with ``do_bench``'s noise (:mod:`fp8tune.measure.simulated`): no kernel runs, all else does
=============  ===================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from fp8tune.errors import UsageError
from fp8tune.measure.clock import Block, Timer, Trial
from fp8tune.measure.steady import is_steady, steadiest
from fp8tune.records import Outcome, Status
from fp8tune.stats import block_value

__all__ = ["Block", "DoBenchTimer", "NoTimer", "Timer", "Trial", "make_timer", "outcome_of", "tick"]

WARMUP_MS = 2.0
MIN_REP_MS = 10.0
"""Block length, from the measuring protocol: ``rep = max(10 ms, 5 x estimate)``."""


class DoBenchTimer:
    """CUDA or HIP events through Triton's ``do_bench``: flushes 256 MiB before each sample, on both vendors."""

    runs_kernels = True

    def block(self, launch: Callable[[], object], trial: Trial) -> Block:
        """One block on the current device. The launch must have run once before, so that nothing compiles here.

        The estimate that sets the block's length is the whole block of a hopeless config: its samples are kept, too.
        A block in which the machine was held up is timed again (:mod:`fp8tune.measure.steady`).
        """
        samples_us, thrown_away = _look(launch), 0
        if _is_hopeless(samples_us, trial):
            # Held up, two looks of 2,450 on an H100 passed for this; the blocks right after them were as fast as ever.
            samples_us += _look(launch)
        if not (_is_hopeless(samples_us, trial) and is_steady(samples_us)):
            rep_ms = max(MIN_REP_MS, 5 * min(samples_us) / 1e3)
            samples_us, thrown_away = steadiest(lambda: _whole_block(launch, rep_ms))
        return Block(samples_us, tick(samples_us), thrown_away)


def _is_hopeless(samples_us: Sequence[float], trial: Trial) -> bool:
    return trial.hopeless_us is not None and min(samples_us) > trial.hopeless_us


def _whole_block(launch: Callable[[], object], rep_ms: float) -> tuple[float, ...]:
    """Every sample in microseconds."""
    from triton.testing import do_bench

    return tuple(1e3 * sample for sample in do_bench(launch, warmup=WARMUP_MS, rep=rep_ms, return_mode="all"))


def _look(launch: Callable[[], object]) -> tuple[float, ...]:
    """Two launches in microseconds, each after a flush of the cache as ``do_bench`` does it.

    A first launch is not kept: it took over 3 % longer than the two others in half of 15,330 looks on H100s and H200s,
    and over 30 % longer in one of twenty.
    """
    import torch
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(3)]
    for start, end in pairs:
        driver.active.clear_cache(cache)
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return tuple(1e3 * start.elapsed_time(end) for start, end in pairs[1:])


class NoTimer:
    """Times nothing: for Triton's interpreter."""

    runs_kernels = True

    def block(self, launch: Callable[[], object], trial: Trial) -> None:
        """None, always."""


def make_timer(text: str) -> Timer:
    """``do_bench``, ``none`` or ``simulated:SEED`` -> a timer. Raises UsageError for anything else.

    ``simulated:SEED.NOISE`` is the same GPU on another day.
    """
    if seeds := re.fullmatch(r"simulated:([0-9]{1,18})(?:\.([0-9]{1,18}))?", text):
        from fp8tune.measure.simulated import SimulatedTimer  # numpy takes a while to import

        return SimulatedTimer(int(seeds[1]), noise_seed=int(seeds[2] or 0))
    if text == "do_bench":
        return DoBenchTimer()
    if text == "none":
        return NoTimer()
    raise UsageError(f"unknown timer {text!r}: use do_bench or simulated:SEED (a whole number)")


def outcome_of(block: Block, process: str) -> Outcome:
    """A block as rows keep it, with its value. ``process`` names the worker process."""
    reason = f"the steadiest of {1 + block.thrown_away} blocks" if block.thrown_away else ""
    value = block_value(block.samples_us)
    return Outcome(Status.OK, value, reason, block.samples_us, block.tick_us, process=process)


def tick(samples_us: tuple[float, ...]) -> float | None:
    """The smallest step between two different samples: an upper bound of the timer's tick. None with one value."""
    values = sorted(set(samples_us))
    steps = [high - low for low, high in pairwise(values) if high - low > 1e-6]
    return min(steps, default=None)
