"""Which config is best: pure functions from evidence to picks. The same evidence in any order gives the same picks.

Everything that competes for one problem on one device is a :class:`Contest`: timed rows of one kernel version and one
device fingerprint, for rows of two versions, GPUs or drivers are never compared. Interpreter and static rows hold no
timings and never compete.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fp8tune.records import Device, Evidence, KernelVersion, Kind, NamedInts, Pool, Problem, Status
from fp8tune.stats import geomean

TIE_BAND = 0.01
"""Configs this close to the best are as good as the best: repeated sweeps swap them at random."""

ROBUST_SLOWDOWN = 1.05
"""What a config for unseen shapes may lose on any shape that was measured."""

_RANKED = (Kind.MEASURED, Kind.SIMULATED, Kind.PUBLISHED)
"""Kinds that carry timings, the better evidence first."""


@dataclass(frozen=True)
class Winner:
    """The pick for one problem on one device. Times in microseconds."""

    problem: Problem
    config: NamedInts | None
    """None where the only rows are published ones whose source names no config."""
    device: Device
    kind: Kind
    time_us: float
    n: int
    """Worker processes, the unit of replication; for a published row, printed figures."""
    source: str = ""
    runner_up: NamedInts | None = None
    runner_up_us: float | None = None
    ratio: float | None = None
    """runner-up / pick: below 1 where the pick is a config tied with a faster one."""
    version: KernelVersion | None = None
    lookup_key: NamedInts | None = None
    bytes_moved: int | None = None
    ceiling_share: float | None = None
    """GB/s over the least bytes moved, as a share of the device's copy ceiling."""
    verdict: str | None = None
    complete: bool = True
    note: str = ""


@dataclass(frozen=True, eq=False)
class Contest:
    """All timed evidence that may be compared on one problem and device, the best first."""

    entries: tuple[Evidence, ...]

    @property
    def problem(self) -> Problem:
        """What all entries ran."""
        return self.entries[0].problem

    @property
    def device(self) -> Device:
        """What all entries ran on; published rows: what their sources name."""
        return self.entries[0].device

    @property
    def kind(self) -> Kind:
        """Where all entries come from."""
        return self.entries[0].kind

    @cached_property
    def named(self) -> tuple[Evidence, ...]:
        """The entries that name their config; a publication may not."""
        return tuple(entry for entry in self.entries if entry.config is not None)

    @cached_property
    def times_us(self) -> Mapping[NamedInts, float]:
        """Named config -> its time; the best of several rows that published the same config."""
        times: dict[NamedInts, float] = {}
        for entry in self.named:
            times.setdefault(entry.config or NamedInts(), value_us(entry))
        return times

    def slowdown(self, config: NamedInts) -> float:
        """Its time over the best named config's, never below 1. Raises KeyError where it has no row here."""
        return max(1.0, self.times_us[config] / value_us(self.named[0]))

    @cached_property
    def pick(self) -> Evidence:
        """The first in canonical order within the tie band of the best; rows that name their config before others."""
        ranked = self.named or self.entries
        bound = value_us(ranked[0]) * (1 + TIE_BAND)
        tied = [entry for entry in ranked if value_us(entry) <= bound and entry.stage == ranked[0].stage]
        return min(tied, key=_canonical_rank)

    def winner(self) -> Winner:
        """The pick with what stands beside it."""
        pick = self.pick
        runner_up = next((entry for entry in self.named if entry.config != pick.config), None)
        time_us = value_us(pick)
        next_us = None if runner_up is None else value_us(runner_up)
        return Winner(
            problem=pick.problem,
            config=pick.config,
            device=pick.device,
            kind=pick.kind,
            time_us=time_us,
            n=len(pick.times_us),
            source=pick.source,
            runner_up=None if runner_up is None else runner_up.config,
            runner_up_us=next_us,
            ratio=None if next_us is None else next_us / time_us,
            version=pick.version,
            lookup_key=pick.lookup_key,
            bytes_moved=pick.bytes_moved,
            ceiling_share=ceiling_share(pick),
            complete=pick.complete,
            note=pick.note,
        )


@dataclass(frozen=True)
class Shared:
    """One config for several problems."""

    config: NamedInts
    mean_slowdown: float
    """Geometric mean over the problems of its time / the best time there."""
    worst_slowdown: float
    slowdowns: tuple[tuple[Problem, float], ...]


def winners(evidence: Iterable[Evidence]) -> list[Winner]:
    """The pick of every problem and device that has timed rows, in a fixed order (kernel, arch, device, shape)."""
    return [contest.winner() for contest in contests(evidence)]


def competing(pools: Iterable[Pool]) -> list[Pool]:
    """The pools that :func:`contests` would rank, told from when they were timed; and all that hold no timings."""
    arenas: dict[Hashable, list[Pool]] = {}
    for pool in pools:
        ranked = pool.kind in _RANKED and pool.newest
        arenas.setdefault((pool.problem, pool.device.arch, pool.device.name) if ranked else pool, []).append(pool)
    return [rivals[0] if len(rivals) == 1 else min(rivals, key=_pool_rank) for rivals in arenas.values()]


def contests(evidence: Iterable[Evidence]) -> list[Contest]:
    """Evidence sorted into what may be compared; per problem and device the newest complete version only.

    Published rows compete only where no row of the same arch, kernel, shape and input layout was measured.
    """
    found = [
        _newest([Contest(tuple(sorted(pool, key=_entry_order))) for pool in _grouped(rows, _pool).values()])
        for rows in _grouped(filter(_is_timed, evidence), _arena).values()
    ]
    measured = {_subject(contest) for contest in found if contest.kind is not Kind.PUBLISHED}
    kept = (c for c in found if c.kind is not Kind.PUBLISHED or _subject(c) not in measured)
    return sorted(kept, key=_contest_order)


def robust(contests: Sequence[Contest], bound: float = ROBUST_SLOWDOWN) -> Shared | None:
    """The config for shapes nobody measured: of least mean slowdown among those that nowhere lose more than ``bound``.

    Where none qualifies: the least worst slowdown. Only configs with a row for every problem count, only complete
    problems with a row that names a config; None where nothing is left.
    """
    judged = usable(contests)
    shared = [_shared(config, judged) for config in _covering(judged)]
    within = [candidate for candidate in shared if candidate.worst_slowdown <= bound]
    if within:
        return min(within, key=lambda c: (c.mean_slowdown, _config_rank(c.config, judged)))
    return min(shared, key=lambda c: (c.worst_slowdown, c.mean_slowdown, _config_rank(c.config, judged)), default=None)


def least_mean_slowdown(contests: Sequence[Contest]) -> Shared | None:
    """The config of least mean slowdown among those that cover every one of these problems; None where none does."""
    return robust(contests, bound=math.inf)


def usable(contests: Iterable[Contest]) -> list[Contest]:
    """Those a table can be made from: swept to the end, with a row that names a config."""
    return [contest for contest in contests if contest.named and contest.pick.complete]


def value_us(entry: Evidence) -> float:
    """What a config is ranked by: the median over its worker processes."""
    return statistics.median(entry.times_us)  # finite as stored


def ceiling_share(entry: Evidence) -> float | None:
    """(bytes moved / time) / copy ceiling; None where the bytes or the ceiling are not known."""
    if not entry.bytes_moved or not entry.ceiling_gb_per_s:
        return None
    gb_per_s = entry.bytes_moved / value_us(entry) / 1e3  # bytes/us = MB/s
    return gb_per_s / entry.ceiling_gb_per_s


def canonical_order(config: NamedInts, axes: Sequence[tuple[str, Sequence[int]]]) -> tuple[object, ...]:
    """Fewer stages, fewer warps, then the declared order of each axis' values, then the text."""
    places = [
        (list(values).index(config[name]) if config[name] in values else len(values), config[name])
        for name, values in axes
        if name in config
    ]
    return config.get("num_stages", 0), config.get("num_warps", 0), tuple(places), config.canonical


def _is_timed(entry: Evidence) -> bool:
    return entry.kind in _RANKED and entry.status is Status.OK and bool(entry.times_us)


def _grouped(rows: Iterable[Evidence], key: Callable[[Evidence], Hashable]) -> dict[Hashable, list[Evidence]]:
    groups: dict[Hashable, list[Evidence]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _arena(entry: Evidence) -> Hashable:
    """What a user asks about: one problem on one kind of device."""
    return entry.problem, entry.device.arch, entry.device.name


def _pool(entry: Evidence) -> Hashable:
    """What may be compared with what."""
    return entry.kind, entry.version and entry.version.source_hash, entry.device


def _newest(pools: Sequence[Contest]) -> Contest:
    if len(pools) == 1:
        return pools[0]

    def rank(contest: Contest) -> tuple[object, ...]:
        first = contest.entries[0]
        newest = max(entry.newest for entry in contest.entries)
        return _pool_rank(Pool(first.problem, first.device, first.kind, first.version, first.complete, newest))

    return min(pools, key=rank)


def _pool_rank(pool: Pool) -> tuple[object, ...]:
    """Measured before published, complete before begun, then the newest; the names decide between equals."""
    version = pool.version.source_hash if pool.version else ""
    return _RANKED.index(pool.kind), not pool.complete, -pool.newest, version, pool.device.fingerprint


def _entry_order(entry: Evidence) -> tuple[object, ...]:
    """Finals first, for the screen's times chose them; then by time; the names decide between equals."""
    config = "" if entry.config is None else entry.config.canonical
    return entry.stage != "final", value_us(entry), config, entry.source, entry.note


def _contest_order(contest: Contest) -> tuple[object, ...]:
    problem, device = contest.problem, contest.device
    shape = sorted(problem.shape.items())
    rest = (
        problem.routing,
        problem.input_layout,
        problem.in_dtype,
        problem.fp8_dtype,
        problem.scale_mode,
        problem.seed,
    )
    return problem.kernel, device.arch, device.name, shape, rest


def _subject(contest: Contest) -> Hashable:
    """What a publication and a measurement have in common: publications say nothing of routing or scales."""
    problem = contest.problem
    return contest.device.arch, problem.kernel, problem.shape, problem.input_layout


def _canonical_rank(entry: Evidence) -> tuple[object, ...]:
    axes = entry.version.axes if entry.version else ()
    order = () if entry.config is None else canonical_order(entry.config, axes)
    return *order, value_us(entry), entry.source, entry.note


def _covering(contests: Sequence[Contest]) -> set[NamedInts]:
    """Configs with a time on every problem."""
    if not contests:
        return set()
    return set.intersection(*(set(contest.times_us) for contest in contests))


def _shared(config: NamedInts, contests: Sequence[Contest]) -> Shared:
    slowdowns = tuple((contest.problem, contest.slowdown(config)) for contest in contests)
    ratios = [ratio for _, ratio in slowdowns]
    return Shared(config, geomean(ratios), max(ratios), slowdowns)


def _config_rank(config: NamedInts, contests: Sequence[Contest]) -> tuple[object, ...]:
    version = contests[0].entries[0].version
    return canonical_order(config, version.axes if version else ())
