"""The fewest configs such that every problem has one within some percent of its best time.

Exact: a minimum set cover, by integer programming. Of the smallest sets one of least worst loss, and of those the first
in canonical order. The same times in any order of the configs give the same set. Times that look like noise can make
that take hours: after some seconds the set is a greedy one instead, which says so.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8tune.choose.pairs import canonical_order
from fp8tune.records import NamedInts
from fp8tune.stats.means import geomean

SECONDS = 4.0
"""What looking for the smallest sets may take, over all bounds."""

FEW = 24
"""Configs that are soon tried, so that no clock decides what they give."""

Axes = Iterable[tuple[str, Sequence[int]]]


@dataclass(frozen=True)
class Covering:
    """A set of configs, and what the problems lose if they may launch nothing else."""

    within: float
    """The bound on the loss of each problem, as a share: 0.02 is 2 %."""
    configs: tuple[NamedInts, ...]
    """In canonical order."""
    chosen: tuple[NamedInts, ...]
    """For each problem the fastest of the set."""
    slowdowns: tuple[float, ...]
    """For each problem the time of ``chosen`` over the best time, at least 1."""
    incomplete: Mapping[int, int]
    """Number of a problem -> configs that have no time there and did not fail there: they may do better."""
    is_smallest: bool = True
    """False for a greedy set, where finding the smallest takes too long: a smaller one may exist."""

    @property
    def worst(self) -> float:
        """The largest loss of any problem, as a share."""
        return max(self.slowdowns) - 1

    @property
    def mean(self) -> float:
        """The geometric mean of the problems' slowdowns, as a loss."""
        return geomean(self.slowdowns) - 1


def coverings(
    slowdowns: Sequence[Mapping[NamedInts, float]],
    within: Iterable[float],
    *,
    failed: Sequence[Collection[NamedInts]] = (),
    axes: Axes = (),
    seconds: float = SECONDS,
) -> list[Covering]:
    """The covering set for each bound of ``within``.

    ``slowdowns``: for each problem the configs that are right there -> their time over the best, at least 1;
    ``failed``: the configs that are wrong there or do not run. A bound whose share of ``seconds`` runs out gets the
    greedy set: each config the one for most of the problems that are left. Raises ValueError for no problems, for a
    problem without a time, and for a bound below 0.
    """
    if not slowdowns or not all(slowdowns):
        raise ValueError("a problem without times cannot be covered" if slowdowns else "no problems")
    axes = [(name, tuple(values)) for name, values in axes]
    known = {config for of_problem in slowdowns for config in of_problem}
    configs = sorted(known, key=canonical_order(axes))
    times = np.array([[of_problem.get(config, math.inf) for config in configs] for of_problem in slowdowns])
    best = times.min(axis=1, keepdims=True)
    gaps = {}
    for number, of_problem in enumerate(slowdowns):
        out = set(failed[number]) if failed else set()
        if missing := len(known - out - of_problem.keys()):
            gaps[number] = missing
    bounds, found = list(within), dict[float, Covering]()
    importlib.import_module("scipy.optimize")  # before the clock starts: it takes long
    began = time.monotonic()
    for number, bound in enumerate(bounds):
        if bound not in found:
            share = (1 + number / len(bounds)) / 2  # half for the first, the one that is asked for
            found[bound] = _covering(configs, times / best, bound, gaps, began + seconds * share)
    return [found[bound] for bound in bounds]


class _OutOfTimeError(Exception):
    """The smallest set is not found in time."""


def _covering(
    configs: Sequence[NamedInts], slowdowns: NDArray[np.float64], within: float, gaps: Mapping[int, int], ends: float
) -> Covering:
    if within < 0:
        raise ValueError(f"a bound of {within} is below 0")
    bound = 1 + within + 1e-12  # a ratio that is 1.02 but for rounding is within 2 %
    is_smallest = True
    try:
        places = _least_loss(slowdowns, bound, ends)
    except _OutOfTimeError:
        places, is_smallest = sorted(_greedy(slowdowns <= bound)), False
    among = slowdowns[:, places]
    chosen = among.argmin(axis=1)
    return Covering(
        within,
        tuple(configs[place] for place in places),
        tuple(configs[places[number]] for number in chosen),
        tuple(map(float, among.min(axis=1))),
        gaps,
        is_smallest,
    )


def _least_loss(slowdowns: NDArray[np.float64], bound: float, ends: float) -> list[int]:
    """The smallest set of columns within the bound, of those one of least worst loss: the first of them."""
    size = _least_size(slowdowns <= bound, ends)
    # the least bound at which a set of this size still covers: with it the worst loss cannot be less
    bounds = np.unique(slowdowns[slowdowns <= bound])
    low, high = int(np.searchsorted(bounds, slowdowns.min(axis=1).max())), len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        if _covers_with(slowdowns <= bounds[middle], size, ends):
            high = middle
        else:
            low = middle + 1
    return _first(slowdowns <= bounds[low], size, ends)


def _covers_with(covers: NDArray[np.bool_], size: int, ends: float) -> bool:
    """Whether so many columns have a True in every row."""
    if not covers.any(axis=1).all():
        return False
    return len(_greedy(covers)) <= size or _least_size(covers, ends) <= size


def _greedy(covers: NDArray[np.bool_]) -> list[int]:
    """Columns that have a True in every row: each the one with the most rows left, the first of equals."""
    left, found = covers, list[int]()
    while left.any():
        found.append(int(left.sum(axis=0).argmax()))
        left = left[~left[:, found[-1]]]
    return found


def _least_size(covers: NDArray[np.bool_], ends: float) -> int:
    """The fewest columns that have a True in every row; there are such."""
    return len(_solved(_reduced(covers)[0], ends))


def _first(covers: NDArray[np.bool_], size: int, ends: float) -> list[int]:
    """Of the covers of this size, which is the least, the first in lexicographic order of what :func:`_reduced` keeps.

    Column by column: the least one that such a cover goes on with, found by halves.
    """
    left, places = _reduced(covers)
    found: list[int] = []
    while len(left):
        low, high = 0, int(_solved(left, ends).min())
        while low < high:
            middle = (low + high) // 2
            begins = _solved(np.vstack([left, np.arange(len(places)) <= middle]), ends)
            if 0 < len(begins) <= size - len(found):
                high = int(begins.min())
            else:
                low = middle + 1
        found.append(int(places[low]))
        left, places = left[~left[:, low], low + 1 :], places[low + 1 :]
    return found


def _reduced(covers: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """The matrix without what does not matter to its least cover, and the places of the columns that are left.

    Left out are columns that another contains, of equal ones the later, and rows that another row implies.
    """
    left, places = covers, np.arange(covers.shape[1])
    while True:
        columns = _undominated(left.T)
        rows = _undominated(~left[:, columns])
        smaller = left[np.ix_(rows, columns)]
        places = places[columns]
        if smaller.shape == left.shape:
            return smaller, places
        left = smaller


def _solved(rows: NDArray[np.bool_], ends: float) -> NDArray[np.intp]:
    """The fewest columns that have a True in every row; none where there is no such set.

    Raises _OutOfTimeError when the clock (``time.monotonic``) is past ``ends``.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not rows.any(axis=1).all():
        return np.array([], dtype=np.intp)
    needed = LinearConstraint(rows.astype(float), lb=1)
    ones = np.ones(rows.shape[1])
    left_s = math.inf if rows.shape[1] <= FEW else ends - time.monotonic()
    if left_s <= 0:
        raise _OutOfTimeError
    solved = milp(
        ones,
        integrality=ones.astype(np.intp),
        bounds=Bounds(0, 1),
        constraints=needed,
        options={"time_limit": left_s},
    )
    if solved.status == 1:  # a limit was reached: what it has may not be the least
        raise _OutOfTimeError
    if solved.x is None:
        raise RuntimeError(f"no set cover found: {solved.message}")
    return np.flatnonzero(solved.x > 0.5)


def _undominated(sets: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The rows that no other row contains; of equal rows the first."""
    counts = sets.astype(np.float32)
    contained = counts @ counts.T == counts.sum(axis=1)[:, None]  # the row is part of the column
    equal = contained & contained.T
    earlier = np.tri(len(sets), k=-1, dtype=bool)
    return np.flatnonzero(~((contained & ~equal) | (equal & earlier)).any(axis=1))
