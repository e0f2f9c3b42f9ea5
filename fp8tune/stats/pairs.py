"""Paired comparison of finalists.

Times of a config vary far less within a process than between processes. The process is therefore the unit of
replication, and contributes one value for each config.
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
    """Return all blocks of the finals. Process names get the sweep as a prefix, which makes them unique."""
    return [
        Block(f"{times.run.sweep} {times.process}", round, config, time_us)
        for config, processes in finals.items()
        for times in processes
        for round, time_us in times.blocks
    ]


def process_values(blocks: Iterable[Block]) -> dict[NamedInts, dict[str, float]]:
    """Return one log time for each config and process: the trimmed mean over rounds, without drift between rounds.

    Drift is removed by subtracting from each round its mean over configs, and adding the mean over all rounds. For an
    interrupted process, only the largest set of rounds and configs without gaps is used.
    """
    processes: dict[str, dict[int, dict[NamedInts, float]]] = {}
    for block in blocks:
        processes.setdefault(block.process, {}).setdefault(block.round, {})[block.config] = math.log(block.time_us)
    values: dict[NamedInts, dict[str, float]] = {}
    for process, rounds in sorted(processes.items()):
        configs, numbers = largest_block(rounds)
        log_times = np.array([[rounds[number][config] for config in configs] for number in numbers])
        centres = log_times.mean(axis=1, keepdims=True)
        means = centres.mean() + _trimmed_mean_over_rounds(log_times - centres)
        for config, mean in zip(configs, means.tolist(), strict=True):
            values.setdefault(config, {})[process] = mean
    return values


def _trimmed_mean_over_rounds(log_times: Matrix) -> Matrix:
    cut = int(TRIMMED_SHARE * len(log_times))
    mean: Matrix = np.sort(log_times, axis=0)[cut : len(log_times) - cut].mean(axis=0)
    return mean


def residuals(log_times: Matrix) -> Matrix:
    """Return the residuals of log times after removing row and column effects."""
    rest: Matrix = log_times - log_times.mean(axis=0) - log_times.mean(axis=1, keepdims=True) + log_times.mean()
    return rest


def largest_block(rows: Mapping[Key, Collection[NamedInts]]) -> tuple[list[NamedInts], list[Key]]:
    """Return configs and rows such that each of the rows has all of the configs. Raises ValueError without rows.

    The product of the two counts is the largest over all sets of configs that a row has or that two rows share.
    """
    if not rows:
        raise ValueError("no values")
    sets = {frozenset(configs) for configs in rows.values()}
    if len(sets) > 1:
        sets |= {first & second for first, second in itertools.combinations(sets, 2)} - {frozenset()}
    candidates = []
    for configs in sets:
        complete = sorted(row for row, present in rows.items() if configs <= set(present))
        candidates.append((sorted(configs, key=lambda config: config.canonical), complete))
    return min(candidates, key=lambda pair: (-len(pair[0]) * len(pair[1]), -len(pair[0]), str(pair[0])))


def canonical_order(axes: Axes) -> Callable[[NamedInts], tuple[object, ...]]:
    """Return a function that computes a config's sort key, which decides between equally fast configs.

    Fewer stages come first, then fewer warps, then axis values as declared (undeclared ones last), then the text.
    """
    places = {name: {value: place for place, value in enumerate(values)} for name, values in axes}

    def order(config: NamedInts) -> tuple[object, ...]:
        values = dict(config.items())
        ranks = [(at.get(values[name], len(at)), values[name]) for name, at in places.items() if name in values]
        return values.get("num_stages", 0), values.get("num_warps", 0), tuple(ranks), config.canonical

    return order


@dataclass(frozen=True, eq=False)
class Pairs:
    """Log slowdowns of each config against each rival, which is any other config, paired by process.

    Configs are in order of preference: the default first, then canonical order. Matrices have indices [config, rival].
    """

    configs: list[NamedInts]
    logs: Matrix  # log microseconds, indexed by config and process
    mean: Matrix  # mean over processes
    error: Matrix  # standard error of the mean; infinite with one process
    quantile: float  # number of standard errors between the mean and its one-sided bound

    @classmethod
    def compare(cls, values: Values, default: NamedInts | None, axes: Axes, alpha: float) -> Pairs:
        """Compare configs by their process values. ``alpha`` is the error rate over all rivals of one config."""
        by_process: dict[str, list[NamedInts]] = {}
        for config, process_logs in values.items():
            for process in process_logs:
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
        """Lower confidence bounds of the log slowdowns."""
        return self.mean - self.quantile * self.error

    @property
    def upper(self) -> Matrix:
        """Upper confidence bounds of the log slowdowns."""
        return self.mean + self.quantile * self.error

    @property
    def fastest(self) -> int:
        """Index of the fastest config; of equally fast ones, the first."""
        return int(self.mean.max(axis=1).argmin())

    def position(self, config: NamedInts | None) -> int | None:
        """Return the index of a config; None if it is not compared."""
        return self.configs.index(config) if config in self.configs else None

    def first_tied(self, band: float, default: int | None) -> int:
        """Return the index of the first config whose slowdown against the fastest, plus its error, is within ``band``.

        If the default is slower than that, return the first such config that is proven faster than the default, if any,
        else the default. ``default`` is an index.
        """
        ties = np.flatnonzero((self.mean + self.error)[:, self.fastest] <= band).tolist()
        if default is None or default in ties:
            return int(ties[0])
        return next((int(index) for index in ties if self.lower[default, index] > 0), default)

    def is_contested(self, pick: int, band: float, sigmas: float) -> bool:
        """Return True if the pick, or a config preferred to it, is within ``sigmas`` errors of the tie band's edge."""
        distance = np.abs(self.mean[: pick + 1, self.fastest] - band)
        return bool((distance < sigmas * self.error[: pick + 1, self.fastest]).any())
