"""Which config is best: pure functions from evidence to picks. The same evidence in any order gives the same picks.

Rows of two kernel versions, GPUs or drivers are never compared. Interpreter and static rows hold no timings and never
compete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fp8tune.choose.candidates import KEEP_BAND, Candidates, Winner, value_us
from fp8tune.choose.incumbents import NO_INCUMBENTS, Incumbents
from fp8tune.choose.pairs import canonical_order
from fp8tune.records import ComparableRows, Evidence, Finalist, KernelVersion, Kind, NamedInts, Pick, Status

Item = TypeVar("Item")
Group = TypeVar("Group", bound=Hashable)

ROBUST_SLOWDOWN = 1.05
"""What a config for unseen shapes may lose on any shape that was measured."""

_RANKED = (Kind.MEASURED, Kind.SIMULATED, Kind.PUBLISHED)
"""Kinds that carry timings, the better evidence first."""

_REST = attrgetter("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode", "seed")


@dataclass(frozen=True)
class Shared:
    """One config for several problems."""

    config: NamedInts
    mean_slowdown: float
    """Geometric mean over the problems of its time / the best time there."""
    worst_slowdown: float


@dataclass(frozen=True, eq=False)
class Losses:
    """What every config loses on some problems of one kernel."""

    configs: Sequence[NamedInts]
    """In canonical order."""
    slowdowns: NDArray[np.float64]
    """(config, problem); nan where it has no time."""
    default: NamedInts
    """The declared default: the axes that a committed config leaves out."""

    @classmethod
    def of(cls, all_candidates: Sequence[Candidates]) -> Losses:
        """Of at least one problem."""
        version = all_candidates[0].entries[0].version
        axes = version.axes if version else ()
        found = {config for candidates in all_candidates for config in candidates.slowdowns}
        configs = sorted(found, key=canonical_order(axes))
        rows = [[candidates.slowdowns.get(config, math.nan) for candidates in all_candidates] for config in configs]
        return cls(configs, np.array(rows), version.default if version else NamedInts())

    @cached_property
    def _logs(self) -> NDArray[np.float64]:
        return np.log(self.slowdowns)

    def shared(self, problems: NDArray[np.bool_] | None = None) -> list[Shared]:
        """The configs with a time on every problem of a mask; None for all."""
        chosen = slice(None) if problems is None else problems
        worst = self.slowdowns[:, chosen].max(axis=1)  # nan where one is
        covering = np.flatnonzero(~np.isnan(worst))
        return [
            Shared(self.configs[place], math.exp(math.fsum(logs) / len(logs)), float(worst[place]))
            for place, logs in zip(covering, self._logs[covering][:, chosen].tolist(), strict=True)
        ]


def winners(evidence: Iterable[Evidence], incumbents: Incumbents = NO_INCUMBENTS) -> list[Winner]:
    """The pick of every problem and device that has timed rows, in a fixed order (kernel, arch, device, shape)."""
    return [candidates.winner for candidates in all_candidates(evidence, incumbents)]


def grouped(items: Iterable[Item], key: Callable[[Item], Group]) -> dict[Group, list[Item]]:
    """What has the same key together, in the order it comes."""
    groups: dict[Group, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def competing(pools: Iterable[ComparableRows]) -> list[ComparableRows]:
    """The pools that :func:`all_candidates` would rank, and all that hold no timings."""

    def key(pool: ComparableRows) -> Hashable:
        return _question(pool) if pool.kind in _RANKED and pool.newest else pool

    return [_ranked_pool(group) if len(group) > 1 else group[0] for group in grouped(pools, key).values()]


def all_candidates(evidence: Iterable[Evidence], incumbents: Incumbents = NO_INCUMBENTS) -> list[Candidates]:
    """Evidence sorted into what may be compared: per problem and device the newest complete version only.

    Finals come before a screen, which on another machine does not replace them. Published rows compete only where no
    row of the same arch, kernel, shape and input layout was measured.
    """
    timed = (entry for entry in evidence if entry.kind in _RANKED and entry.status is Status.OK and entry.times_us)
    found = [_newest(rows) for rows in grouped(timed, _question).values()]
    measured = {_subject(candidates) for candidates in found if candidates.kind is not Kind.PUBLISHED}
    kept = (c for c in found if c.kind is not Kind.PUBLISHED or _subject(c) not in measured)
    return sorted((_with_incumbent(candidates, incumbents) for candidates in kept), key=order)


def _with_incumbent(candidates: Candidates, incumbents: Incumbents) -> Candidates:
    first = candidates.entries[0]
    if first.lookup_key is None:
        return candidates
    incumbent = incumbents.config(first.problem.kernel, first.device, first.lookup_key)
    return replace(candidates, incumbent=completed(incumbent, first.version))


def completed(config: NamedInts | None, version: KernelVersion | None) -> NamedInts | None:
    """A table's config with the declared default of every axis that its row leaves out, as a lookup completes it."""
    return config if config is None or version is None else NamedInts({**version.default, **config})


def robust(
    all_candidates: Sequence[Candidates], bound: float = ROBUST_SLOWDOWN, incumbent: NamedInts | None = None
) -> Shared | None:
    """The config for shapes nobody measured: of least mean slowdown among those that nowhere lose more than ``bound``.

    Where none qualifies: the least worst slowdown. Only configs with a row for every :func:`usable` problem count; None
    where there is none. ``incumbent`` stays while it is within the keep band of the bound and of the least mean
    slowdown. Others then count only if they are as far below the bound (or the incumbent's worst, if that is more).
    """
    known = usable(all_candidates)
    if not known:
        return None
    losses = Losses.of(known)
    kept = None if incumbent is None else NamedInts({**losses.default, **incumbent})
    return choose(losses.shared(), bound, kept)


def choose(
    shared: Sequence[Shared], bound: float = ROBUST_SLOWDOWN, incumbent: NamedInts | None = None
) -> Shared | None:
    """What :func:`robust` chooses among configs in canonical order."""
    within = [each for each in shared if each.worst_slowdown <= bound]
    kept = [each for each in shared if each.config == incumbent and each.worst_slowdown <= bound * (1 + KEEP_BAND)]
    if kept:  # noise may carry another over the edge of the bound that chose this one
        edge = max(bound, kept[0].worst_slowdown) / (1 + KEEP_BAND)
        within = [*kept, *(each for each in within if each.worst_slowdown <= edge and each.config != incumbent)]
    if within:
        return _least(within, lambda each: each.mean_slowdown, incumbent)
    return _least(shared, lambda each: each.worst_slowdown, incumbent) if shared else None


def _least(shared: Sequence[Shared], loss: Callable[[Shared], float], incumbent: NamedInts | None) -> Shared:
    """The incumbent within the keep band of the least loss, else the first of least loss."""
    least = min(shared, key=lambda each: (loss(each), each.mean_slowdown))
    kept = [each for each in shared if each.config == incumbent and loss(each) <= loss(least) * (1 + KEEP_BAND)]
    return kept[0] if kept else least


def usable(all_candidates: Iterable[Candidates]) -> list[Candidates]:
    """Those a table can be made from: swept to the end, with a row that names a config."""
    return [candidates for candidates in all_candidates if candidates.named and candidates.pick.complete]


def _question(entry: Evidence | ComparableRows) -> Hashable:
    """What a user asks about: one problem on one kind of device."""
    return entry.problem, entry.device.arch, entry.device.name


def _newest(rows: Sequence[Evidence]) -> Candidates:
    """Of one question's rows those that are ranked, in order."""
    pools = list(grouped(rows, lambda row: (row.kind, row.version and row.version.source_hash, row.device)).values())
    if len(pools) > 1:
        by_pool = {_pool_of(pool): pool for pool in pools}
        pools = [by_pool[_ranked_pool(list(by_pool))]]
    return Candidates(tuple(sorted(pools[0], key=_entry_order)))


def _pool_of(entries: Sequence[Evidence]) -> ComparableRows:
    first = min(entries, key=_entry_order)
    newest = max(entry.newest for entry in entries)
    return ComparableRows(
        first.problem, first.device, first.kind, first.version, first.complete, newest, first.has_finals
    )


def _ranked_pool(pools: Sequence[ComparableRows]) -> ComparableRows:
    """The pool that is ranked: of the version that ranks first, finals before a screen."""
    newest = min(pools, key=_pool_rank)
    peers = [pool for pool in pools if _version(pool) == _version(newest) and pool.complete == newest.complete]
    return min(peers, key=lambda pool: (not pool.has_finals, _pool_rank(pool)))


def _pool_rank(pool: ComparableRows) -> tuple[object, ...]:
    """Measured before published, complete before begun, then the newest; the names decide between equals."""
    return _RANKED.index(pool.kind), not pool.complete, -pool.newest, _version(pool), pool.device.fingerprint


def _version(pool: ComparableRows) -> str:
    return pool.version.source_hash if pool.version else ""


def _entry_order(entry: Evidence) -> tuple[object, ...]:
    """Finals first, for the screen's times chose them; then by time; the names decide between equals."""
    config = "" if entry.config is None else entry.config.canonical
    return entry.stage != "final", value_us(entry), config, entry.source, entry.note


def order(of: Candidates | Pick | Finalist) -> tuple[object, ...]:
    """What picks are sorted by: kernel, arch, device, shape, then the rest of the problem."""
    problem, device = of.problem, of.device
    return problem.kernel, device.arch, device.name, sorted(problem.shape.items()), _REST(problem)


def _subject(candidates: Candidates) -> Hashable:
    """What a publication and a measurement have in common: publications say nothing of routing or scales."""
    problem = candidates.problem
    return candidates.device.arch, problem.kernel, problem.shape, problem.input_layout
