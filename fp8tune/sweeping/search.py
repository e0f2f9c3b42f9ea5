"""A search in place of the coarse pass's first round, where a grid does not fit the time budget.

Each visit of a problem size tries batches of configs that :mod:`fp8tune.stats.search` proposes, from all times of the
kernel in the database: those of other sizes, of other devices, and of other workers that search beside this one.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from fp8tune.plan import grids
from fp8tune.plan.problems import seed_text
from fp8tune.records import Kind, NamedInts
from fp8tune.stats.means import median
from fp8tune.stats.search import Times, proposals
from fp8tune.sweeping.coarse import CoarsePass
from fp8tune.sweeping.events import Event, RoundStarted
from fp8tune.sweeping.planning import Plan, ProblemPlan

SHARE, QUICK_SHARE = 0.6, 0.9  # of the time budget: the rest is for the confirmation, or for later rounds alone
VISITS, LEAST_VISIT_S = 8, 3.0  # later visits know what the other sizes showed; each builds the inputs of its size anew
BATCH = 8  # configs that run together; as many more as there are compilers may be chosen before these have times
CANDIDATES, FRESH = 800, 100  # configs that are judged for a batch, and those of them that were not before
DRAWS = 5_000  # of a grid that is not built, for the fresh ones of a batch
BEST = 5  # configs whose neighbours are candidates whatever is drawn
MOST_CONTENDERS = 32  # later rounds repeat no more configs
COMPILE_S = 1.0  # of one config on one core
SIMULATED_S = 0.001  # of one config on the simulated GPU


def is_needed(plan: Plan, sizes: Sequence[ProblemPlan], budget_s: float) -> bool:
    """Return True if the grids of some problem sizes take longer than a time budget."""
    cores = max((os.cpu_count() or 2) - 1, 1)

    def seconds(size: ProblemPlan, count: int) -> float:
        if plan.backend.kind is Kind.SIMULATED:
            return count * SIMULATED_S
        return size.coarse_s * count / size.count + count * COMPILE_S / cores

    if sum(seconds(size, size.count) for size in sizes) <= budget_s:
        return False
    # Many configs may be pruned. Grids are built only until those that are not take too long.
    total_s = itertools.accumulate(seconds(size, unpruned(size.configs)) for size in sizes)
    return any(seconds > budget_s for seconds in total_s)


def unpruned(configs: Mapping[NamedInts, str]) -> int:
    """Return the number of configs that are tried; of a grid that is never built, of all."""
    return configs.size if isinstance(configs, grids.Product) else sum(not reason for reason in configs.values())


def visits(passes: Sequence[CoarsePass], until: float, clock: Callable[[], float]) -> Iterator[Event]:
    """Search on each problem size several times, so that each learns from the others."""
    searches = [coarse for coarse in passes if isinstance(coarse, SearchPass)]
    count = min(VISITS, max(1, int((until - clock()) / (LEAST_VISIT_S * max(len(searches), 1)))))
    for left in range(count * len(searches), 0, -1):
        begun = clock()
        yield from searches[-left % len(searches)].visit(begun + (until - begun) / left, clock)


class SearchPass(CoarsePass):
    """A coarse pass whose first round is a search."""

    first_round: ClassVar[int] = 1

    def queue(self) -> int:
        """Queue nothing for the compilers: nobody knows which configs are tried."""
        self.drawn = self.accepted = 0  # configs drawn of a grid that is not built, and those that are not pruned
        self.others: list[Times] = []  # times of the kernel on other sizes and devices
        self._random = random.Random(f"search {self.plan.settings.seed} {seed_text(self.size.problem)}")
        self._pool: list[NamedInts] = []
        self._ahead: list[NamedInts] = []  # proposed, and compiling or compiled
        # Processes of a confirmation time all finalists: another config cannot join those that have begun.
        self.is_closed = bool(self.store.finals(self.plan.subject(self.size), self.sweep_id))
        return 0

    @property
    def seen(self) -> int:
        """Number of configs that were tried."""
        return len(self.tried)

    @property
    def valid(self) -> int:
        """Number of configs that are not pruned, estimated for a grid that is not built."""
        count = unpruned(self.size.configs)
        is_estimated = isinstance(self.size.configs, grids.Product) and self.drawn
        return round(count * self.accepted / self.drawn) if is_estimated else count

    def visit(self, until: float, clock: Callable[[], float]) -> Iterator[Event]:
        """Try batches of configs until a moment."""

        def is_over() -> bool:
            return clock() > until

        self.read()
        known = [config for config in self.known.get(0, {}) if config not in self.tried]
        yield RoundStarted(self.size.problem, self.index, 0, self.plan.coarse_rounds, self.size.count)
        yield from self.round(0, [config for config in known if not self.size.configs[config]], is_over)
        self.read_others()
        while not (is_over() or self.is_closed) and (batch := self._batch()):
            yield from self.round(0, batch, is_over)

    def read_others(self) -> None:
        """Read the times of the kernel on other sizes and devices."""
        version, own = self.size.version, (self.size.problem, self.plan.backend.device, self.size.version.source_hash)
        self.others = [
            Times(
                study.problem,
                study.device.name,
                {result.config: result.value_us for result in study.results if result.config and not result.source},
            )
            for study in self.store.studies(version.kernel, kinds=[self.plan.backend.kind])
            if (study.problem, study.device, study.source_hash) != own
        ]

    def _batch(self) -> list[NamedInts]:
        """Return the configs to run next, while others compile; none if all were tried.

        What is proposed before its predecessors have times knows less, so there is no more of it than was tried.
        """
        backend = self.plan.backend
        self._ahead = [config for config in self._ahead if config not in self.tried]
        most = max(BATCH, min(BATCH + backend.compilers, len(self.tried)))
        if len(self._ahead) < most:
            self._ahead += self._proposals(most - len(self._ahead))
        backend.compile([self.size.arm(config) for config in self._ahead])
        compiled = [config for config in self._ahead if backend.is_compiled(self.size.arm(config))]
        return (compiled or self._ahead)[:BATCH]

    def _proposals(self, count: int) -> list[NamedInts]:
        named = (self.size.default, self.size.current, self.size.fallback, *self.size.in_use)
        if first := [config for config in dict.fromkeys(named) if config is not None and self._is_new(config)]:
            return first
        slowest_us = max((time_us for time_us in self.tried.values() if time_us is not None), default=1.0)
        own_us = {config: time_us or slowest_us for config, time_us in self.tried.items()}
        own = Times(self.size.problem, self.plan.backend.device.name, own_us)
        ready = {config for known in self.others if known.device == own.device for config in known.times_us}
        return proposals(count, self._candidates(own_us), own, self.others, ready, self._ahead)

    def _is_new(self, config: NamedInts) -> bool:
        is_known = config in self.tried or config in self._ahead
        return not is_known and config in self.size.configs and not self.size.configs[config]

    def _candidates(self, own_us: Mapping[NamedInts, float]) -> list[NamedInts]:
        """Return configs at random, those next to the best, and the best of other sizes and devices."""
        best = [*_fastest(own_us), *(config for times in self.others for config in _fastest(times.times_us)[:2])]
        near = (config for config in dict.fromkeys(best) for config in (config, *self._neighbours(config)))
        fresh = itertools.islice(self._drawn(), FRESH if self._pool else CANDIDATES // 2)
        seen = {*self.tried, *self._ahead}
        pool = dict.fromkeys(config for config in (*fresh, *self._pool) if config not in seen)
        self._pool = [*pool][:CANDIDATES]
        return [*dict.fromkeys([*self._pool, *filter(self._is_new, near)])]

    def _drawn(self) -> Iterator[NamedInts]:
        configs = self.size.configs
        if not isinstance(configs, grids.Product):
            left = [config for config, reason in configs.items() if not reason and config not in self.tried]
            yield from self._random.sample(left, len(left))
            return
        for _ in range(DRAWS):
            config = configs.at(self._random.randrange(configs.size))
            is_valid = not configs[config]
            self.drawn, self.accepted = self.drawn + 1, self.accepted + is_valid
            if is_valid and config not in self.tried:
                yield config

    def _neighbours(self, config: NamedInts) -> Iterator[NamedInts]:
        """Yield configs that differ on one axis by a step."""
        configs = self.size.configs
        axes = configs.axes if isinstance(configs, grids.Product) else dict(self.size.version.axes)
        for axis, values in axes.items():
            place = values.index(config[axis]) if config.get(axis) in values else -2
            for value in values[max(place - 1, 0) : place] + values[place + 1 : place + 2] if place >= 0 else ():
                yield NamedInts({**config, axis: value})

    def contenders(self) -> list[NamedInts]:
        """Return the fastest configs, and those that are confirmed in any case."""
        by_time = sorted(self.times_us, key=lambda config: (median(self.times_us[config]), config.canonical))
        always = [config for config in self.size.always if config in self.times_us]
        return [*dict.fromkeys([*by_time[:MOST_CONTENDERS], *always])]

    def left_out(self) -> int:
        """Return the number of configs that later rounds would time."""
        return max(len(self.contenders()), 1)


def _fastest(times_us: Mapping[NamedInts, float]) -> list[NamedInts]:
    return sorted(times_us, key=lambda config: times_us[config])[:BEST]
