"""Paired comparison of finalists.

A config's times agree far better within a process than between processes, so the process is the unit of replication.
Every process contributes one value for each config, and nothing downstream looks inside of one.
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

Axes = Sequence[tuple[str, Sequence[int]]]
"""The declared grid: axis names with their values, in declaration order."""

Finals = Mapping[NamedInts, Sequence[ProcessTimes]]
"""Finals of each finalist."""

Values = Mapping[NamedInts, Mapping[str, float]]
"""Config -> process -> log microseconds."""

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
    # Processes with the same configs and number of rounds are computed together, which is ten times as fast.
    alike: dict[tuple[tuple[NamedInts, ...], int], dict[str, list[list[float]]]] = {}
    for process, rounds in sorted(processes.items()):
        configs, numbers = largest_block(rounds)
        logs = [[rounds[number][config] for config in configs] for number in numbers]
        alike.setdefault((tuple(configs), len(numbers)), {})[process] = logs
    by_process: dict[str, dict[NamedInts, float]] = {}
    for (names, _), logs_of in alike.items():
        stacked = np.array(list(logs_of.values()))  # process, round, config
        centres = stacked.mean(axis=2, keepdims=True)
        means = centres[..., 0].mean(axis=1, keepdims=True) + _trimmed_mean(stacked - centres)
        for process, row in zip(logs_of, means.tolist(), strict=True):
            by_process[process] = dict(zip(names, row, strict=True))
    values: dict[NamedInts, dict[str, float]] = {}
    for process in sorted(by_process):
        for config, value in by_process[process].items():
            values.setdefault(config, {})[process] = value
    return values


def _trimmed_mean(logs: Matrix) -> Matrix:
    cut = int(TRIMMED_SHARE * logs.shape[1])
    mean: Matrix = np.sort(logs, axis=1)[:, cut : logs.shape[1] - cut].mean(axis=1)
    return mean


def residuals(logs: Matrix) -> Matrix:
    """Return a matrix of log times without the levels of its rows and columns."""
    rest: Matrix = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    return rest


def largest_block(rows: Mapping[Key, Collection[NamedInts]]) -> tuple[list[NamedInts], list[Key]]:
    """Return the largest block of configs and rows without gaps.

    Candidates are the sets of configs that occur, and the intersection of any two of them.

    Raises:
        ValueError: There are no rows.
    """
    if not rows:
        raise ValueError("no values")
    sets = {frozenset(configs) for configs in rows.values()}
    if len(sets) > 1:
        sets |= {first & second for first, second in itertools.combinations(sets, 2)} - {frozenset()}
    blocks = [
        (
            sorted(configs, key=lambda config: config.canonical),
            sorted(row for row, present in rows.items() if configs <= set(present)),
        )
        for configs in sets
    ]
    return min(blocks, key=lambda block: (-len(block[0]) * len(block[1]), -len(block[0]), str(block[0])))


def canonical_order(axes: Axes) -> Callable[[NamedInts], tuple[object, ...]]:
    """Return a sort key for configs that are equally fast.

    Fewer stages come first, then fewer warps, then the declared order of each axis's values, then the text. Values that
    no axis declares come last.
    """
    places = {name: {value: place for place, value in enumerate(values)} for name, values in axes}

    def order(config: NamedInts) -> tuple[object, ...]:
        values = dict(config.items())
        declared = [(of.get(values[name], len(of)), values[name]) for name, of in places.items() if name in values]
        return values.get("num_stages", 0), values.get("num_warps", 0), tuple(declared), config.canonical

    return order


@dataclass(frozen=True, eq=False)
class Pairs:
    """Log slowdowns of every config against every other one, paired over processes.

    Configs are in the order of preference: the default first, then canonical order. Matrices are indexed by config,
    then rival.
    """

    configs: list[NamedInts]
    logs: Matrix
    """Log microseconds, indexed by config and process."""
    mean: Matrix
    error: Matrix
    """Standard errors of the mean; infinite with one process."""
    quantile: float
    """Standard errors from the mean to its one-sided bound."""

    @classmethod
    def of(cls, values: Values, default: NamedInts | None, axes: Axes, alpha: float) -> Pairs:
        """Compare configs by their process values. ``alpha`` is shared among the rivals of one config."""
        by_process: dict[str, list[NamedInts]] = {}
        for config, of_config in values.items():
            for process in of_config:
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

        If the default is not within the band, the config must also be proven faster than the default; the default
        itself is returned if none is.
        """
        tied = np.flatnonzero((self.mean + self.error)[:, self.fastest] <= band).tolist()
        if default is None or default in tied:
            return int(tied[0])
        return next((int(place) for place in tied if self.lower[default, place] > 0), default)

    def is_contested(self, pick: int, band: float, sigmas: float) -> bool:
        """Return True if the pick, or a preferred config, lies near the edge of the tie band."""
        distance = np.abs(self.mean[: pick + 1, self.fastest] - band)
        return bool((distance < sigmas * self.error[: pick + 1, self.fastest]).any())
