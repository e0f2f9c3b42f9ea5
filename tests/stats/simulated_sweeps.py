"""Sweeps of made-up problems on the simulated GPU, without database or workers: a hundred a second.

The true times, the noise and the choosing are fp8tune's own; only the bookkeeping between them is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fp8tune.measure.simulated import Noise, log_slowdown, near_share
from fp8tune.records import NamedInts
from fp8tune.stats.decide import MeasuringPlan, decide
from fp8tune.stats.pairs import Block, process_values
from fp8tune.stats.screen import choose_finalists
from fp8tune.stats.study import Decision

AXES = (
    ("BLOCK_SIZE", (32, 64, 128, 256)),
    ("BLOCK_SIZE_ITER", (64, 128, 256, 512)),
    ("num_warps", (1, 2, 4, 8)),
    ("num_stages", (1, 2)),
)
CONFIGS = tuple(
    NamedInts(tuple(zip((name for name, _ in AXES), values, strict=True)))
    for values in itertools.product(*(values for _, values in AXES))
)
PLACES = {config: place for place, config in enumerate(CONFIGS)}
TIMED_AGAIN = 1.3
"""Configs within this of the best get later rounds, as in :class:`fp8tune.sweeping.planning.Plan`."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SimulatedProblem:
    """True times of a problem's configs."""

    logs: Floats
    """(config,): true log microseconds, the mean over processes."""
    bimodal: NDArray[np.bool_]
    default: NamedInts
    noise: Noise

    @classmethod
    def draw(cls, random: Generator, noise: Noise) -> SimulatedProblem:
        """Its best at 20-1,000 us; the declared default anywhere in the faster third."""
        slowdowns = log_slowdown(random.random(len(CONFIGS)), near_share(random.random()))
        bimodal = random.random(len(CONFIGS)) < noise.bimodal_share
        logs = math.log(20) + random.random() * math.log(50) + slowdowns + noise.mean_mode(bimodal)
        default = CONFIGS[np.argsort(logs)[random.integers(len(CONFIGS) // 3)]]
        return cls(logs, bimodal, default, noise)

    def slowdown(self, config: NamedInts, rival: NamedInts | None = None) -> float:
        """Return the true slowdown of a config against ``rival``, or against the best: 0.01 is one percent."""
        best = self.logs.min() if rival is None else self.logs[PLACES[rival]]
        return math.expm1(self.logs[PLACES[config]] - best)


class Process:
    """A worker process that times blocks of one problem, its wall clock running on."""

    def __init__(self, problem: SimulatedProblem, random: Generator) -> None:
        noise = problem.noise
        self.noise, self.random = noise, random
        mode = noise.mode_effect(random, problem.bimodal) - noise.mean_mode(problem.bimodal)
        self.logs = problem.logs + noise.process_effect(random, len(CONFIGS)) + mode
        self.wall = noise.wall(random)
        self.carry_over = noise.carry_over_sd * random.standard_normal(len(CONFIGS))
        self.blocks = 0

    def rounds_us(self, configs: NDArray[np.intp], rounds: int = 1) -> Floats:
        """(round, config): a block of each config (places in CONFIGS) a round, in random order; the values in the order
        given."""
        noise, count = self.noise, len(configs)
        drawn = [(self.random.permutation(count), self.random.standard_normal(count)) for _ in range(rounds)]
        order, own = (np.array(item) for item in zip(*drawn, strict=True))
        drift = self.wall(noise.block_s * np.arange(self.blocks, self.blocks + rounds * count, dtype=np.float64))
        after = self.carry_over[configs[np.roll(order, 1, axis=1)]]
        self.blocks += rounds * count
        logs = np.empty((rounds, count))
        of_blocks = self.logs[configs[order]] + drift.reshape(rounds, count) + after + noise.block_sd * own
        np.put_along_axis(logs, order, of_blocks, axis=1)
        times_us: Floats = noise.tick_us * np.round(np.exp(logs) / noise.tick_us)
        return times_us


def sweep(
    problem: SimulatedProblem, incumbent: NamedInts | None, random: Generator, plan: MeasuringPlan = MeasuringPlan()
) -> Decision:
    """Screen, finals in as many processes as it takes, pick."""
    keepers = [config for config in (incumbent, problem.default) if config is not None]
    chosen = choose_finalists(screen(problem, random, plan), AXES, keepers, plan)
    blocks: list[Block] = []
    for processes in (plan.processes, *plan.more_processes):
        while (number := len(blocks) // (plan.rounds * len(chosen))) < processes:
            blocks.extend(finals(problem, chosen, str(number), random, plan))
        values = process_values(blocks)
        decision = decide(values, current=incumbent, default=problem.default, axes=AXES, plan=plan)
        if not decision.needs_more:
            break
    return decision


def screen(problem: SimulatedProblem, random: Generator, plan: MeasuringPlan) -> Mapping[NamedInts, Sequence[float]]:
    """All configs once, then those that may be the best, in one process."""
    process = Process(problem, random)
    times_us = np.full((plan.screen_rounds, len(CONFIGS)), np.nan)
    places = np.arange(len(CONFIGS))
    for number in range(plan.screen_rounds):
        times_us[number, places] = process.rounds_us(places)[0]
        typical = _typical(times_us[: number + 1])
        places = np.flatnonzero(typical <= TIMED_AGAIN * typical.min())
    timed = [[time_us for time_us in times if time_us == time_us] for times in times_us.T.tolist()]
    return dict(zip(CONFIGS, timed, strict=True))


def _typical(times_us: Floats) -> Floats:
    """The median over rounds, of those that a config has. As ``np.nanmedian``, which takes ten times as long."""
    ordered, count = np.sort(times_us, axis=0), np.isfinite(times_us).sum(axis=0)
    middle = np.stack([(count - 1) // 2, count // 2])
    median: Floats = np.take_along_axis(ordered, middle, axis=0).mean(axis=0)
    return median


def finals(
    problem: SimulatedProblem, chosen: Sequence[NamedInts], name: str, random: Generator, plan: MeasuringPlan
) -> Iterator[Block]:
    """One fresh process' blocks."""
    process = Process(problem, random)
    places = np.array([PLACES[config] for config in chosen])
    for number, times_us in enumerate(process.rounds_us(places, plan.rounds).tolist()):
        for config, time_us in zip(chosen, times_us, strict=True):
            yield Block(name, number, config, time_us)
