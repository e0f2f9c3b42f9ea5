"""A search in place of the first round of the coarse pass, where a grid does not fit the time budget.

Each visit of a problem size tries batches of configs that :mod:`fp8tune.stats.search` proposes, from all times of the
kernel in the database: those of other sizes, of other devices, and of other workers that search beside this one.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fp8tune.plan import grids
from fp8tune.plan.problems import seed_text
from fp8tune.records import Kind, NamedInts
from fp8tune.stats.search import Times, proposals
from fp8tune.store.results import Store
from fp8tune.sweeping.planning import Plan, ProblemPlan

SHARE, QUICK_SHARE = 0.6, 0.9  # of the time budget: the rest is for the confirmation, or for later rounds alone
VISITS, LEAST_VISIT_S = 8, 3.0  # later visits know what the other sizes showed; each builds the inputs of its size anew
BATCH = 8  # configs that compile and run together before the next ones are chosen
CANDIDATES, FRESH = 800, 100  # configs that are judged for a batch, and those of them that were not before
DRAWS = 5_000  # of a grid that is not built, for the fresh ones of a batch
BEST = 5  # configs whose neighbours are candidates whatever is drawn
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


def unpruned(configs: object) -> int:
    """Return the number of configs that are tried; of a grid that is never built, of all."""
    if isinstance(configs, grids.Product):
        return configs.size
    assert isinstance(configs, grids.Grid | dict)
    return sum(not reason for reason in configs.values())


@dataclass
class Search:
    """The search on one problem size."""

    store: Store
    plan: Plan
    size: ProblemPlan
    drawn: int = 0  # configs of a grid that is not built, drawn to learn how many of it are pruned
    accepted: int = 0
    others: list[Times] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(f"search {self.plan.settings.seed} {seed_text(self.size.problem)}")
        self._pool: list[NamedInts] = []

    @property
    def valid(self) -> int:
        """Number of configs that are not pruned, estimated for a grid that is not built."""
        count = unpruned(self.size.configs)
        is_estimated = isinstance(self.size.configs, grids.Product) and self.drawn
        return round(count * self.accepted / self.drawn) if is_estimated else count

    def read(self) -> None:
        """Read the times of the kernel on other sizes and devices."""
        version, device, kind = self.size.version, self.plan.backend.device, self.plan.backend.kind
        self.others = []
        for study in self.store.studies(version.kernel, kinds=[kind]):
            if (study.problem, study.device, study.source_hash) != (self.size.problem, device, version.source_hash):
                times = {
                    result.config: result.value_us for result in study.results if result.config and not result.source
                }
                self.others.append(Times(study.problem, study.device.name, times))

    def batch(self, own: dict[NamedInts, float], tried: Iterable[NamedInts]) -> list[NamedInts]:
        """Return the configs to try next; none if all were tried. ``own`` are the times on this problem size."""
        tried = set(tried)
        in_use = [self.size.version.default, self.size.current, self.size.fallback]
        in_use += [self.size.today.config] if self.size.today else []
        first = dict.fromkeys(config for config in in_use if config is not None and self._is_new(config, tried))
        if first:
            return [*first]
        times = Times(self.size.problem, self.plan.backend.device.name, own)
        ready = {config for known in self.others if known.device == times.device for config in known.times_us}
        return proposals(BATCH, self._candidates(own, tried), times, self.others, ready)

    def _is_new(self, config: NamedInts, tried: set[NamedInts]) -> bool:
        return config not in tried and config in self.size.configs and not self.size.configs[config]

    def _candidates(self, own: dict[NamedInts, float], tried: set[NamedInts]) -> list[NamedInts]:
        """Return configs at random, those next to the best, and the best of other sizes and devices."""
        best = [*_fastest(own), *(config for times in self.others for config in _fastest(times.times_us)[:2])]
        near = (config for config in dict.fromkeys(best) for config in (config, *self._neighbours(config)))
        fresh = itertools.islice(self._drawn(tried), FRESH if self._pool else CANDIDATES // 2)
        self._pool = [*dict.fromkeys([*fresh, *(config for config in self._pool if config not in tried)])][:CANDIDATES]
        return [*dict.fromkeys([*self._pool, *(config for config in near if self._is_new(config, tried))])]

    def _drawn(self, tried: set[NamedInts]) -> Iterator[NamedInts]:
        configs = self.size.configs
        if not isinstance(configs, grids.Product):
            left = [config for config, reason in configs.items() if not reason and config not in tried]
            yield from self._random.sample(left, len(left))
            return
        for _ in range(DRAWS):
            config = configs.at(self._random.randrange(configs.size))
            is_valid = not configs[config]
            self.drawn, self.accepted = self.drawn + 1, self.accepted + is_valid
            if is_valid and config not in tried:
                yield config

    def _neighbours(self, config: NamedInts) -> Iterator[NamedInts]:
        """Yield configs that differ on one axis by a step."""
        configs = self.size.configs
        axes = configs.axes if isinstance(configs, grids.Product) else dict(self.size.version.axes)
        for axis, values in axes.items():
            place = values.index(config[axis]) if config.get(axis) in values else -2
            for value in values[max(place - 1, 0) : place] + values[place + 1 : place + 2] if place >= 0 else ():
                yield NamedInts({**config, axis: value})


def _fastest(times_us: dict[NamedInts, float]) -> list[NamedInts]:
    return sorted(times_us, key=lambda config: times_us[config])[:BEST]
