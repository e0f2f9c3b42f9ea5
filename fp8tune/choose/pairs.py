"""The finalists of one problem, each beside each other: how much slower it is, and how sure that is. Pure functions.

The process is the unit of replication: differences are paired over processes, and nothing here looks inside of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fp8tune.records import NamedInts
from fp8tune.stats.estimate import t_quantile

Axes = Sequence[tuple[str, Sequence[int]]]
Key = TypeVar("Key", str, int)


def canonical_order(axes: Axes) -> Callable[[NamedInts], tuple[object, ...]]:
    """What configs are sorted by: fewer stages, fewer warps, then the declared order of each axis' values, then the
    text. Values that no axis declares come last."""
    declared = {name: {value: place for place, value in enumerate(values)} for name, values in axes}

    def order(config: NamedInts) -> tuple[object, ...]:
        given = dict(config.items())
        known = [(given[name], of_value) for name, of_value in declared.items() if name in given]
        places = [(of_value.get(value, len(of_value)), value) for value, of_value in known]
        return given.get("num_stages", 0), given.get("num_warps", 0), tuple(places), config.canonical

    return order


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of finalists, in the order in which they are preferred. Log slowdowns of a config against a rival."""

    configs: Sequence[NamedInts]
    logs: NDArray[np.float64]
    """(config, process): log microseconds."""
    mean: NDArray[np.float64]
    """(config, rival)."""
    error: NDArray[np.float64]
    """(config, rival): standard error of the mean, paired over processes; infinite with one process."""
    quantile: float
    """Standard errors from the mean to its one-sided bound."""

    @classmethod
    def of(
        cls, values: Mapping[NamedInts, Mapping[str, float]], default: NamedInts | None, axes: Axes, alpha: float
    ) -> Pairs:
        """``alpha`` is shared out over the rivals of one config."""
        names = dict.fromkeys(process for of_config in values.values() for process in of_config)
        chosen, processes = largest_block(
            {name: [config for config in values if name in values[config]] for name in names}
        )
        configs = sorted(chosen, key=canonical_order(axes))
        configs.sort(key=lambda config: config != default)
        logs = np.array([[values[config][process] for process in processes] for config in configs])
        differences, count = logs[:, None, :] - logs[None, :, :], len(processes)
        if count < 2:
            return cls(configs, logs, differences[..., 0], np.where(np.eye(len(configs)), 0.0, np.inf), 1.0)
        error = differences.std(axis=2, ddof=1) / math.sqrt(count)
        quantile = t_quantile(1 - alpha / max(1, len(configs) - 1), count - 1)
        return cls(configs, logs, differences.mean(axis=2), error, quantile)

    @property
    def lower(self) -> NDArray[np.float64]:
        """(config, rival): it is at least this much slower."""
        return self.mean - self.quantile * self.error

    @property
    def upper(self) -> NDArray[np.float64]:
        """(config, rival): it is at most this much slower."""
        return self.mean + self.quantile * self.error

    @property
    def fastest(self) -> int:
        """The first of the fastest."""
        return int(self.mean.max(axis=1).argmin())

    def first_tied(self, band: float, default: int | None) -> int:
        """The first that is within ``band`` of the fastest with a standard error to spare, and proven faster than the
        default where that is not; the default where none is.
        """
        tied = np.flatnonzero((self.mean + self.error)[:, self.fastest] <= band)
        if default is None or default in tied:
            return int(tied[0])
        return next((int(place) for place in tied if self.lower[default, place] > 0), default)

    def is_contested(self, pick: int, band: float, sigmas: float) -> bool:
        """Whether the pick, or a config preferred to it, may be on the other side of the edge of the tie band."""
        distance = np.abs(self.mean[: pick + 1, self.fastest] - band)
        return bool((distance < sigmas * self.error[: pick + 1, self.fastest]).any())


def largest_block(cells: Mapping[Key, Collection[NamedInts]]) -> tuple[list[NamedInts], list[Key]]:
    """The largest block of configs times keys without a gap: what failed now and then, or was stopped half-way, is out.

    Looked for among the sets that occur and what any two of them share.
    """
    if not cells:
        raise ValueError("no values")
    sets = {frozenset(configs) for configs in cells.values()}
    if len(sets) == 1:
        return sorted(*sets, key=lambda config: config.canonical), sorted(cells)
    sets |= {first & second for first, second in itertools.combinations(sets, 2)} - {frozenset()}
    found = {chosen: sorted(key for key, configs in cells.items() if chosen <= set(configs)) for chosen in sets}
    blocks = [(sorted(chosen, key=lambda config: config.canonical), keys) for chosen, keys in found.items()]
    return min(blocks, key=lambda block: (-len(block[0]) * len(block[1]), -len(block[0]), str(block[0])))
