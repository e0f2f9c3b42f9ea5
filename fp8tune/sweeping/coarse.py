"""The coarse pass of a problem size: rounds of trials that choose the configs to confirm.

Each round is a seeded permutation: the first of every config, later ones of those that may still be the best. A trial
that fails is a row with its reason, and one that has a result is not run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from fp8tune.ceiling import FLOP_PER_S
from fp8tune.measure.arms import KernelArm, Place
from fp8tune.measure.engine import Ceiling, CompileProgress
from fp8tune.plan.problems import seed_text
from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.stats.means import median
from fp8tune.store.results import Store
from fp8tune.sweeping.events import Event, RoundStarted, TrialDone
from fp8tune.sweeping.planning import Plan, ProblemPlan


class CoarsePass:
    """The coarse pass of one problem size."""

    first_round: ClassVar[int] = 0

    def __init__(self, store: Store, plan: Plan, sweep_id: int, size: ProblemPlan, index: int) -> None:
        self.store, self.plan, self.sweep_id, self.size, self.index = store, plan, sweep_id, size, index
        self.times_us: dict[NamedInts, list[float]] = {}  # block values, the rounds in order
        self.tried: dict[NamedInts, float | None] = {}  # times of the first round, None for failures
        self.is_done = False
        self.read()
        self.queued = self.queue()

    def queue(self) -> int:
        """Give the compilers what they have to do. Returns the number of configs."""
        known, configs = self.known.get(0, {}), self.size.configs
        todo = [config for config in self._permuted([*configs], 0) if config not in known and not configs[config]]
        self.plan.backend.compile(list(map(self._arm, todo)))
        return len(todo)

    def read(self) -> None:
        """Read the results that need no new trial, by round."""
        rounds = self.store.tried_in_rounds(
            self.plan.subject(self.size),
            sweep=self.sweep_id if self.plan.options.again else None,
            reference=self.size.reference_hash,
            limits=self.plan.backend.limits,
        )
        self.known_at, configs = self.store.changes, self.size.configs

        def counts(config: NamedInts, outcome: Outcome) -> bool:  # a config may be pruned no longer
            return config in configs and (outcome.status is not Status.PRUNED or bool(configs[config]))

        self.known: Mapping[int, Mapping[NamedInts, Outcome]] = {
            round: {config: outcome for config, outcome in outcomes.items() if counts(config, outcome)}
            for round, outcomes in rounds.items()
        }

    def run(self, is_over: Callable[[], bool]) -> Iterator[Event]:
        """Run all rounds; stored results come first in each."""
        if self.known_at != self.store.changes:  # another process stored something
            self.read()
        rounds = self.plan.coarse_rounds if self.plan.backend.times else 1
        for round in range(self.first_round, rounds):
            configs = self._permuted(self.contenders() if round else [*self.size.configs], round)
            yield RoundStarted(self.size.problem, self.index, round, rounds, len(configs))
            yield from self.round(round, configs, is_over)
            if is_over():
                self.read()
                if not set(configs) <= self.known.get(round, {}).keys():
                    return
        self.is_done = self.seen > 0
        if self.is_done and not self.plan.is_partial:
            self.store.mark_complete(self.sweep_id, self.plan.subject(self.size), self.seen)

    @property
    def seen(self) -> int:
        """Number of configs that have a result once all rounds are over."""
        return len(self.size.configs)

    def contenders(self) -> list[NamedInts]:
        """Return the configs that may still be the best, and those that launches use: no single block drops these."""
        limit_us = self.plan.contender_ratio * min(map(median, self.times_us.values()), default=math.inf)
        times = ((config, self.times_us[config]) for config in self.size.configs if config in self.times_us)
        in_use = {*self.size.in_use, self.size.fallback}
        return [config for config, blocks in times if config in in_use or median(blocks) <= limit_us]

    def round(self, round: int, configs: Sequence[NamedInts], is_over: Callable[[], bool]) -> Iterator[Event]:
        """Run a round of some configs, in this order."""
        known, pruned, backend = self.known.get(round, {}), self.size.configs, self.plan.backend
        places = {config: Place(round=round, position=position) for position, config in enumerate(configs)}
        for config in filter(known.__contains__, configs):
            yield self._done(config, known[config], Place(round=round), from_database=True)
        for config in [config for config in places if config not in known and pruned[config]]:
            yield self._done(config, Outcome(Status.PRUNED, reason=pruned[config]), places[config])
        todo = [config for config in places if config not in known and not pruned[config]]
        arms = list(map(self._arm, todo))
        for result in backend.screen(arms, [places[config] for config in todo], is_over):
            match result:
                case CompileProgress():
                    yield result
                case Ceiling("", gb_per_s):
                    self.store.record_ceiling(self.sweep_id, backend.device, gb_per_s)
                case Ceiling(in_dtype, flop_per_s):
                    self.store.record_calibration(self.sweep_id, backend.device, FLOP_PER_S + in_dtype, flop_per_s)
                case (number, outcome):
                    yield self._done(todo[number], outcome, places[todo[number]])

    def _arm(self, config: NamedInts) -> KernelArm:
        return replace(self.size.arm(config), races_once=self.plan.is_partial and config != self.size.current)

    def _done(self, config: NamedInts, outcome: Outcome, place: Place, *, from_database: bool = False) -> TrialDone:
        row = self.plan.row(self.size, config, outcome, place, outcome.process)
        if not from_database:
            self.store.add_soon(self.sweep_id, row)
        if outcome.time_us is not None:
            self.times_us.setdefault(config, []).append(outcome.time_us)
        else:  # what failed in a later round is no finalist
            self.times_us.pop(config, None)
        if not place.round:
            self.tried[config] = outcome.time_us
        return TrialDone(row, from_database=from_database)

    def left_out(self) -> int:
        """Return the number of configs without a result."""
        self.read()
        return len(self.size.configs.keys() - self.known.get(0, {}).keys())

    def _permuted(self, configs: Sequence[NamedInts], round: int) -> list[NamedInts]:
        return self.plan.permuted(configs, round, seed_text(self.size.problem))
