"""Paired comparison of finalists.

A config's times agree far better within a process than between processes, so the process is the unit of replication:
each contributes one value for each config.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp8tune.records import NamedInts, ProcessTimes
from fp8tune.stats.estimate import t_quantile
from fp8tune.stats.means import TRIMMED_SHARE

Axes = Sequence[tuple[str, Sequence[int]]]  # axis names with their values, in declaration order
Finals = Mapping[NamedInts, Sequence[ProcessTimes]]
Values = Mapping[NamedInts, Mapping[str, float]]  # config -> process -> log microseconds
Matrix = NDArray[np.float64]
Key = TypeVar("Key", str, int)


class Block(NamedTuple):
    """One timed block of one config."""

    process: str
    round: int
    config: NamedInts
    time_us: float


def blocks_of(finals: Finals) -> list[Block]:
    """Return all blocks of some finals. Process names are unique within a sweep, so the sweep becomes part of them."""
    return [
        Block(f"{times.run.sweep} {times.process}", round, config, time_us)
        for config, of_config in finals.items()
        for times in of_config
        for round, time_us in times.blocks
    ]


def process_values(blocks: Iterable[Block]) -> dict[NamedInts, dict[str, float]]:
    """Return the trimmed mean of each process's round-centred log times.

    A round's centre is its mean over configs, so drift between rounds cancels. The level of the process is added back.
    Of a process that was interrupted, the largest set of rounds and configs without gaps counts.
    """
    processes: dict[str, dict[int, dict[NamedInts, float]]] = {}
    for block in blocks:
        processes.setdefault(block.process, {}).setdefault(block.round, {})[block.config] = math.log(block.time_us)
    values: dict[NamedInts, dict[str, float]] = {}
    for process, rounds in sorted(processes.items()):
        configs, numbers = largest_block(rounds)
        logs = np.array([[rounds[number][config] for config in configs] for number in numbers])
        centres = logs.mean(axis=1, keepdims=True)
        means = centres.mean() + _trimmed_mean(logs - centres)
        for config, mean in zip(configs, means.tolist(), strict=True):
            values.setdefault(config, {})[process] = mean
    return values


def _trimmed_mean(logs: Matrix) -> Matrix:
    cut = int(TRIMMED_SHARE * len(logs))
    mean: Matrix = np.sort(logs, axis=0)[cut : len(logs) - cut].mean(axis=0)
    return mean


def residuals(logs: Matrix) -> Matrix:
    """Return a matrix of log times without the levels of its rows and columns."""
    rest: Matrix = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    return rest


def largest_block(rows: Mapping[Key, Collection[NamedInts]]) -> tuple[list[NamedInts], list[Key]]:
    """Return the largest block of configs and rows without gaps. Raises ValueError without rows.

    Candidates are the sets of configs that occur, and the intersection of any two of them.
    """
    if not rows:
        raise ValueError("no values")
    sets = {frozenset(configs) for configs in rows.values()}
    if len(sets) > 1:
        sets |= {first & second for first, second in itertools.combinations(sets, 2)} - {frozenset()}
    blocks = []
    for configs in sets:
        complete = sorted(row for row, present in rows.items() if configs <= set(present))
        blocks.append((sorted(configs, key=lambda config: config.canonical), complete))
    return min(blocks, key=lambda block: (-len(block[0]) * len(block[1]), -len(block[0]), str(block[0])))


def canonical_order(axes: Axes) -> Callable[[NamedInts], tuple[object, ...]]:
    """Return a sort key for configs that are equally fast.

    Fewer stages come first, then fewer warps, then each axis's values as declared (others last), then the text.
    """
    places = {name: {value: place for place, value in enumerate(values)} for name, values in axes}

    def order(config: NamedInts) -> tuple[object, ...]:
        values = dict(config.items())
        ranks = [(at.get(values[name], len(at)), values[name]) for name, at in places.items() if name in values]
        return values.get("num_stages", 0), values.get("num_warps", 0), tuple(ranks), config.canonical

    return order


@dataclass(frozen=True, eq=False)
class Pairs:
    """Log slowdowns of every config against every other one, paired over processes.

    Configs are in the order of preference: the default first, then canonical order. Matrices are indexed by config,
    then rival.
    """

    configs: list[NamedInts]
    logs: Matrix  # log microseconds, indexed by config and process
    mean: Matrix
    error: Matrix  # standard errors of the mean; infinite with one process
    quantile: float  # standard errors from the mean to its one-sided bound

    @classmethod
    def compare(cls, values: Values, default: NamedInts | None, axes: Axes, alpha: float) -> Pairs:
        """Compare configs by their process values. ``alpha`` is shared among the rivals of one config."""
        by_process: dict[str, list[NamedInts]] = {}
        for config, logs_of in values.items():
            for process in logs_of:
                by_process.setdefault(process, []).append(config)
        complete, processes = largest_block(by_process)
        order = canonical_order(axes)
        configs = sorted(complete, key=lambda config: (config != default, *order(config)))
        logs = np.array([[values[config][process] for process in processes] for config in configs])
        differences, count = logs[:, None, :] - logs[None, :, :], len(processes)
        if count < 2:
            unknown = np.where(np.eye(len(configs)), 0.0, np.inf)
            return cls(configs, logs, differences[..., 0], unknown, 1.0)
        error = differences.std(axis=2, ddof=1) / math.sqrt(count)
        quantile = t_quantile(1 - alpha / max(1, len(configs) - 1), count - 1)
        return cls(configs, logs, differences.mean(axis=2), error, quantile)

    @property
    def lower(self) -> Matrix:
        """Lower bounds of the slowdowns."""
        return self.mean - self.quantile * self.error

    @property
    def upper(self) -> Matrix:
        """Upper bounds of the slowdowns."""
        return self.mean + self.quantile * self.error

    @property
    def fastest(self) -> int:
        """Position of the fastest config; the first of several."""
        return int(self.mean.max(axis=1).argmin())

    def position(self, config: NamedInts | None) -> int | None:
        """Return the position of a config; None if it is not compared."""
        return self.configs.index(config) if config in self.configs else None

    def first_tied(self, band: float, default: int | None) -> int:
        """Return the first config within ``band`` of the fastest, with a standard error to spare.

        If the default is not within the band, it must also be proven faster than the default, which is taken otherwise.
        """
        ties = np.flatnonzero((self.mean + self.error)[:, self.fastest] <= band).tolist()
        if default is None or default in ties:
            return int(ties[0])
        return next((int(place) for place in ties if self.lower[default, place] > 0), default)

    def is_contested(self, pick: int, band: float, sigmas: float) -> bool:
        """Return True if the pick, or a preferred config, lies near the edge of the tie band."""
        distance = np.abs(self.mean[: pick + 1, self.fastest] - band)
        return bool((distance < sigmas * self.error[: pick + 1, self.fastest]).any())
