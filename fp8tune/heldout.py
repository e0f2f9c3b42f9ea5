"""What a shape loses that nobody measured: each is left out in turn, and judges what a lookup gives without it.

A lookup can give the row for any shape, or the row of the nearest key: both are judged. The measured problems play the
unseen ones, so nothing new is timed. Pure functions on contests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp8tune.ranking import Contest, Shared, choose, usable
from fp8tune.records import NamedInts, Problem
from fp8tune.stats import geomean
from fp8tune_kernels.nearest import nearest
from fp8tune_kernels.tables import Key, Row

Losses = Sequence[tuple[float, float]]
"""One config's slowdown and its logarithm on each contest; NaN where it has no time there."""


@dataclass(frozen=True)
class LeftOut:
    """One problem, judged by a config that was chosen without its shape."""

    problem: Problem
    config: NamedInts
    slowdown: float | None
    """Its time over the best config's there, at least 1; None where it has no time there (it failed or was pruned)."""


@dataclass(frozen=True)
class Regret:
    """The slowdowns of a kernel's problems under one rule, each with its shape left out."""

    problems: tuple[LeftOut, ...]

    @property
    def geomean_slowdown(self) -> float | None:
        """The geometric mean of the slowdowns there are; None where there is none."""
        return geomean(self._slowdowns) if self._slowdowns else None

    @property
    def worst_slowdown(self) -> float | None:
        """The largest of the slowdowns there are; None where there is none."""
        return max(self._slowdowns, default=None)

    @property
    def untimed(self) -> int:
        """Problems on which the config chosen without them has no time."""
        return len(self.problems) - len(self._slowdowns)

    @property
    def _slowdowns(self) -> list[float]:
        return [left.slowdown for left in self.problems if left.slowdown is not None]


@dataclass(frozen=True)
class HeldOut:
    """The same problems under both rules."""

    robust: Regret
    """By the row for any shape."""
    nearest: Regret
    """By the row of the nearest key; by the row for any shape where no key can be compared."""


def leave_one_shape_out(
    contests: Sequence[Contest], rows: Sequence[Row], others: Sequence[Contest] = ()
) -> HeldOut | None:
    """Each shape is left out with all that share its lookup keys, and its problems (routings, layouts) are judged.

    ``contests`` are of one kernel, and those that its row for any shape is chosen on; ``rows`` are its rows with a key;
    ``others`` are problems of devices that take these rows without a say in the row for any shape. Where no config
    covers the other shapes, the lookup would give the declared default, and so that is judged. None where no shape can
    be left out: there is nothing to choose from without one.
    """
    chosen_from = usable(contests)
    judged = [*chosen_from, *usable(others)]
    configs = dict.fromkeys(config for contest in chosen_from for config in contest.times_us)
    table = {config: _losses(config, chosen_from) for config in configs}  # once, and not for every shape again
    by_shape: dict[NamedInts, list[Contest]] = {}
    for contest in judged:
        by_shape.setdefault(contest.problem.shape, []).append(contest)
    pairs = [pair for own in by_shape.values() for pair in _left_out(own, chosen_from, table, rows)]
    if not pairs:
        return None
    robust, near = zip(*pairs, strict=True)
    return HeldOut(Regret(robust), Regret(near))


def nearest_loses_less(held_out: Iterable[HeldOut]) -> bool:
    """Whether the nearest key's row loses less in the geometric mean, over the problems that the other has a time on.

    It must have a time on all of those. ``held_out`` are all of one kernel: one rule holds for all devices of an arch.
    """
    problems = [pair for found in held_out for pair in zip(found.robust.problems, found.nearest.problems, strict=True)]
    pairs = [(robust.slowdown, near.slowdown) for robust, near in problems if robust.slowdown is not None]
    timed = [(robust, near) for robust, near in pairs if near is not None]
    if not timed or len(timed) < len(pairs):
        return False
    return geomean(near for _, near in timed) < geomean(robust for robust, _ in timed)


def _losses(config: NamedInts, contests: Sequence[Contest]) -> Losses:
    slowdowns = [contest.slowdown(config) if config in contest.times_us else math.nan for contest in contests]
    return [(slowdown, math.log(slowdown)) for slowdown in slowdowns]


def _left_out(
    own: Sequence[Contest], contests: Sequence[Contest], table: Mapping[NamedInts, Losses], rows: Sequence[Row]
) -> list[tuple[LeftOut, LeftOut]]:
    """The problems of one shape, judged by what is chosen from the rest."""
    keys = {_key(contest) for contest in own}
    rest = [place for place, contest in enumerate(contests) if _key(contest) not in keys]
    if not rest:
        return []
    candidates = [_shared(config, [losses[place] for place in rest]) for config, losses in table.items()]
    covering = [candidate for candidate in candidates if math.isfinite(candidate.mean_slowdown)]
    chosen = choose(covering, [contests[place] for place in rest])
    robust = chosen.config if chosen else _default(own[0])
    kept = [row for row in rows if row[2] not in keys]
    return [(_judged(contest, robust), _judged(contest, _nearest(contest, kept) or robust)) for contest in own]


def _nearest(contest: Contest, rows: Sequence[Row]) -> NamedInts | None:
    """What a lookup gives on the contest's device."""
    row = nearest(_key(contest), [row for row in rows if row[1] in (contest.device.name, "")])
    return NamedInts(row[3]) if row else None


def _shared(config: NamedInts, losses: Losses) -> Shared:
    mean = math.exp(math.fsum(log for _, log in losses) / len(losses))  # as geomean has it, to the last bit
    return Shared(config, mean, max(slowdown for slowdown, _ in losses), ())


def _judged(contest: Contest, config: NamedInts) -> LeftOut:
    slowdown = contest.slowdown(config) if config in contest.times_us else None
    return LeftOut(contest.problem, config, slowdown)


def _key(contest: Contest) -> Key:
    return tuple(sorted((contest.pick.lookup_key or NamedInts()).items()))


def _default(contest: Contest) -> NamedInts:
    version = contest.entries[0].version
    return version.default if version else NamedInts()
