"""The clocks: one protocol, three timers. A block is the only primitive: repeated timings of one config in one process.

=============  ===================================================================================================
``do_bench``   the GPU's: ``triton.testing.do_bench`` with a flushed L2 and every sample kept
``none``       the interpreter's: bytes are checked, nothing is timed, because its times say nothing of a GPU
``simulated``  a seeded model with ``do_bench``'s noise: no kernel runs, the whole program does
=============  ===================================================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from fp8tune.errors import UsageError

WARMUP_MS = 2.0
MIN_REP_MS = 10.0
"""Block length, from the measuring protocol: ``rep = max(10 ms, 5 x estimate)``."""


@dataclass(frozen=True)
class Block:
    """Samples of one block in microseconds, and the timer's tick as far as they show it."""

    samples_us: tuple[float, ...]
    tick_us: float | None


@dataclass(frozen=True)
class Trial:
    """What is timed, as far as a clock that draws its times needs to know."""

    identity: str
    """Names problem and config: the same text has the same true time."""
    round: int
    bytes_moved: int
    hopeless_us: float | None = None
    """A config slower than this cannot be the pick, and is not worth a whole block."""


class Timer(Protocol):
    """Anything that can time a launch."""

    runs_kernels: bool
    """False where no kernel needs to be built or checked, because none runs."""

    def block(self, launch: Callable[[], None], trial: Trial) -> Block | None:
        """Time ``launch``; None where this clock does not time."""
        ...


class DoBenchTimer:
    """CUDA or HIP events through Triton's ``do_bench``: flushes 256 MiB before each sample, on both vendors."""

    runs_kernels = True

    def block(self, launch: Callable[[], None], trial: Trial) -> Block:
        """One block on the current device. The launch must have run once before, so that nothing compiles here.

        The estimate that sets the block's length is the whole block of a hopeless config: its samples are kept, too.
        """
        from triton.testing import do_bench

        samples_ms = _look(launch)
        if trial.hopeless_us is None or 1e3 * min(samples_ms) <= trial.hopeless_us:
            rep_ms = max(MIN_REP_MS, 5 * min(samples_ms))
            samples_ms = do_bench(launch, warmup=WARMUP_MS, rep=rep_ms, return_mode="all")
        samples_us = tuple(1e3 * sample for sample in samples_ms)
        return Block(samples_us, tick(samples_us))


def _look(launch: Callable[[], None]) -> list[float]:
    """Three launches in milliseconds, each after a flush of the cache as ``do_bench`` does it."""
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
    return [start.elapsed_time(end) for start, end in pairs]


class NoTimer:
    """Times nothing: for Triton's interpreter."""

    runs_kernels = True

    def block(self, launch: Callable[[], None], trial: Trial) -> None:
        """None, always."""


class SimulatedTimer:
    """A fake GPU for tests and demonstrations: exact, seeded, no kernel runs.

    A config's true time is the bytes over 3 TB/s, plus 5 us, times a slowdown of 0-60 % drawn from the trial's
    identity and the seed. Block noise has a standard deviation of 0.35 %, samples one of 1 %, and 2 % of samples are
    5-50 % high: guesses until they are measured.
    """

    runs_kernels = False
    SAMPLES = 30
    TICK_US = 0.032

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def true_time_us(self, trial: Trial) -> float:
        """The noiseless time of a trial in microseconds: the same in every round."""
        digest = hashlib.sha256(f"{self.seed} {trial.identity}".encode()).digest()
        slowdown = int.from_bytes(digest[:4], "big") / 2**32
        return (5 + trial.bytes_moved / 3e6) * (1 + 0.6 * slowdown)

    def block(self, launch: Callable[[], None], trial: Trial) -> Block:
        """Samples drawn for this trial: the same for the same seed."""
        import numpy

        digest = hashlib.sha256(f"samples {self.seed} {trial.round} {trial.identity}".encode()).digest()
        random = numpy.random.default_rng(list(digest))
        block_us = self.true_time_us(trial) * (1 + 0.0035 * random.standard_normal())
        samples = block_us * (1 + 0.01 * random.standard_normal(self.SAMPLES))
        outlier = random.random(self.SAMPLES) < 0.02
        samples = numpy.where(outlier, samples * random.uniform(1.05, 1.5, self.SAMPLES), samples)
        ticks = numpy.maximum(1, numpy.round(samples / self.TICK_US))
        return Block(tuple(float(sample) for sample in ticks * self.TICK_US), self.TICK_US)


def make_timer(text: str) -> Timer:
    """``do_bench``, ``none`` or ``simulated:SEED`` -> a timer. Raises UsageError for anything else."""
    name, _, seed = text.partition(":")
    if name == "simulated" and seed.isdecimal():
        return SimulatedTimer(int(seed))
    if text == "do_bench":
        return DoBenchTimer()
    if text == "none":
        return NoTimer()
    raise UsageError(f"unknown timer {text!r}: use do_bench or simulated:SEED (a whole number)")


def tick(samples_us: tuple[float, ...]) -> float | None:
    """The smallest step between two different samples: an upper bound of the timer's tick. None with one value."""
    values = sorted(set(samples_us))
    steps = [high - low for low, high in pairwise(values) if high - low > 1e-6]
    return min(steps, default=None)
