"""Turn the grid of a launch into a table by calling the caller's function with each config."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fp8tune.replay.recording import Grid, Value
from fp8tune.replay.values import encoded

MOST_ENTRIES = 4096
LARGEST_POWER = {1: 16, 2: 13}  # number of axes -> the power of two up to which blocks are widened; 10 for more axes
COUNTS = tuple(range(1, 9))  # values beside the declared ones of any other axis

Heuristics = Mapping[str, Callable[[Any], Any]]


class _Noting(UserDict[str, Any]):
    """Arguments of a launch as a grid gets them; notes which it reads. Heuristics are computed when they are read.

    A grid that unpacks it reads everything.
    """

    def __init__(self, values: Mapping[str, Any], heuristics: Heuristics, read: set[str]) -> None:
        self._heuristics, self._read = heuristics, read
        super().__init__(values)

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        if name not in self.data and name in self._heuristics:
            self.data[name] = self._heuristics[name](self)
        return self.data[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.data or name in self._heuristics else default

    def __iter__(self) -> Iterator[str]:
        self._read.update(self.data)
        return iter(self.data)


def grid_of(grid: Any, bound: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], heuristics: Heuristics) -> Grid:
    """Return the programs for each config, and for powers of two around the declared values that the grid reads.

    ``bound``: the launch's arguments; ``configs``: what each declared config sets. A config for which the grid raises
    is left out. Raises what the grid raises for all of them, Unrecordable for a value of a config.
    """
    if not callable(grid):
        return Grid((), (((), tuple(map(int, grid))),))
    read = set[str]()

    def programs(config: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(map(int, grid(_Noting({**bound, **config}, heuristics, read))))

    answers: list[tuple[Mapping[str, Any], tuple[int, ...]]] = []
    failure: Exception | None = None
    for config in configs:
        try:
            answers.append((config, programs(config)))
        except Exception as error:  # a config that this launch never gets, such as one that pruning leaves out
            failure = error
    if not answers and failure is not None:
        raise failure
    axes = tuple(name for name in dict.fromkeys(itertools.chain(*configs)) if name in read)
    table: dict[str, tuple[tuple[Value, ...], tuple[int, ...]]] = {}
    for config, counts in answers:
        values = tuple(encoded(config.get(axis), f"config value {axis}") for axis in axes)
        table[json.dumps(values)] = values, counts
    for combination in itertools.product(*_widened(axes, [config for config, _ in answers])):
        values = tuple(encoded(value, "") for value in combination)
        if (key := json.dumps(values)) not in table:
            with contextlib.suppress(Exception):  # a value that the grid refuses is left out
                table[key] = values, programs({**configs[0], **dict(zip(axes, combination, strict=True))})
    return Grid(axes, tuple(table.values()))


def _widened(axes: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the values of each axis: as declared, and more as long as the product stays small."""
    declared = [list(dict.fromkeys(config[axis] for config in configs if axis in config)) for axis in axes]
    wide = []
    for axis, values in zip(axes, declared, strict=True):
        is_block = "BLOCK" in axis.upper() or all(value in _BLOCKS for value in values)
        more = [2**power for power in range(3, LARGEST_POWER.get(len(axes), 10) + 1)] if is_block else COUNTS
        are_integers = values and all(type(value) is int for value in values)
        wide.append(list(dict.fromkeys([*values, *(more if are_integers else ())])))
    return next((each for each in (wide, declared) if math.prod(map(len, each)) <= MOST_ENTRIES), [[]] * len(axes))


_BLOCKS = frozenset(2**power for power in range(3, 64))
