"""The stages of a recheck, each cheaper than a sweep, and each the end of the work for most sizes.

1. Same machine code as when the config in use was timed: nothing to time.
2. One process times the config in use beside its known rivals, and beside a few others that were near the best, other
   ones on each size. Those whose times changed join the rivals on all sizes of the kernel. Where the config in use may
   be beaten, fresh processes decide.
3. With a time budget, sizes whose best known config has become slower are swept. What is left of the budget confirms
   the other sizes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from statistics import fmean, median

from fp8tune.measure import codegen
from fp8tune.measure.device import software
from fp8tune.measure.programs import Wanted, compile_programs
from fp8tune.rechecking.targets import Target
from fp8tune.records import Compiler, Device, KernelVersion, NamedInts, Problem, Program
from fp8tune.stats.decide import PLAN, decide_study
from fp8tune.stats.means import group_by
from fp8tune.stats.same_code import Programs
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.sweeping import picks
from fp8tune.sweeping.children import sweep
from fp8tune.sweeping.events import Event
from fp8tune.sweeping.planning import Plan, ProblemPlan
from fp8tune.sweeping.session import placed
from fp8tune_kernels.arches import ARCHES

CONTESTED = 1.0125  # slowdown in one process from which fresh ones decide: half an error below the keep band
SAMPLE = 5  # configs of each size that were no rivals and are timed all the same
COVER = 2  # sizes of a kernel on which a config is timed without being a rival there: more of them say little more
NEAR_RATIO = 1.2  # time over the best in older sweeps of those
CHANGED = 0.03  # change of a log time that is no chance: three to four errors of two coarse passes
NEAR, AHEAD = 0.08, -0.01  # expected log slowdown up to which a config becomes a rival: a changed one, any other
PROMOTED = 4
LOST = 0.025  # log slowdown of the best known config: the keep band, and an error of the coarse pass
MOST = 0.5  # a ranking is void if so many of the known configs changed
RIVALS, RIVAL_RATIO = 3, 1.03  # configs that fresh processes time beside the one in use and the default
COARSE_ROUNDS, ROUNDS = 2, 2  # the process is the unit: more rounds in each say little
CONTENDER_RATIO = 1.1  # within which the second round repeats a config
DECISIONS = (PLAN.processes, *PLAN.more_processes[:1])


class State(StrEnum):
    """Result of a size, as the columns of the screen count it."""

    SAME_CODE = "same code"
    """The machine code is that of older measurements, so these count."""
    STILL_BEST = "still best"
    """No known config is proven faster by more than the keep band."""
    BEATEN = "beaten"
    """A known config is proven faster by more than the keep band, or the config in use fails."""
    TO_SWEEP = "to sweep"
    """The best known config has become slower than others may have, so only a sweep can decide."""
    NOT_REACHED = "not reached"
    """Nothing was timed: the budget ended before, or there is no GPU."""


@dataclass(frozen=True)
class Rechecked:
    """A size after the recheck."""

    target: Target
    new: Study | None = None
    """Results with the versions installed here; decided if fresh processes confirmed them."""
    is_same_code: bool = False
    needs_sweep: bool = False

    @property
    def problem(self) -> Problem:
        """The size."""
        return self.target.size.problem

    @cached_property
    def times_us(self) -> Mapping[NamedInts, float]:
        """Times that count: of the confirmation, else of the one process."""
        if self.new is None:
            return {}
        return self.new.choice.times_us if self.is_confirmed else self.new.coarse_us

    @property
    def is_confirmed(self) -> bool:
        """True if fresh processes timed the config in use, or others because that one fails."""
        new, current = self.new, self.target.current
        if new is None or new.decision is None:
            return False
        return current in new.finals or (self.fails and new.choice.pick in new.finals)

    @property
    def best(self) -> NamedInts:
        """The config to use."""
        current, new = self.target.current, self.new
        if self.is_confirmed and new is not None:
            return new.choice.pick
        if self.fails and new is not None and new.coarse_us:
            return min(new.coarse_us, key=lambda config: new.coarse_us[config])
        return current

    @property
    def fails(self) -> bool:
        """True if the config in use fails."""
        return self.new is not None and self.target.current in self.new.failures

    @property
    def slowdown(self) -> float | None:
        """Time of the config in use over that of the fastest known config; None if it was not timed."""
        times_us = self.times_us
        if self.target.current not in times_us:
            return None
        return times_us[self.target.current] / min(times_us.values())

    @property
    def tried(self) -> dict[NamedInts, None]:
        """Configs that have a result with the versions installed here, after those that are known."""
        new = self.new
        return dict.fromkeys([*self.target.known, *([*new.coarse_us, *new.failures] if new else [])])

    @property
    def finalists(self) -> list[NamedInts]:
        """Configs that fresh processes time: the one in use, the default, and the fastest others."""
        times_us = {} if self.new is None else self.new.coarse_us
        always = [self.target.current, self.target.size.default]
        limit_us = RIVAL_RATIO * min(times_us.values(), default=0.0)
        near = [config for config, time_us in times_us.items() if time_us <= limit_us and config not in always]
        others = sorted(near, key=lambda config: times_us[config])
        return [config for config in dict.fromkeys(always) if config in times_us] + others[:RIVALS]

    @cached_property
    def changes(self) -> Mapping[NamedInts, float]:
        """Change of each config's log time since the older versions, by coarse passes."""
        if self.target.old is None or self.new is None:
            return {}
        old_us, new_us = self.target.old.coarse_us, self.new.coarse_us
        return {config: math.log(new_us[config] / old_us[config]) for config in old_us if config in new_us}

    @cached_property
    def middle(self) -> float:
        """Median change: of the GPU, the day, and what became faster or slower for all configs alike."""
        return median(self.changes.values()) if self.changes else 0.0

    @property
    def is_lost(self) -> bool:
        """True if what is known does not say which config is best, and the size was not swept.

        The best known config is slower than before beside the others, or most of them changed.
        """
        new, old, changes = self.new, self.target.old, self.changes
        if new is None or old is None or not new.coarse_us or len(changes) < 2:
            return new is not None and not new.coarse_us and bool(new.failures)
        loss = math.log(min(new.coarse_us.values()) / min(old.coarse_us[config] for config in changes)) - self.middle
        changed = [abs(change - self.middle) > CHANGED for change in changes.values()]
        is_void = len(changes) > 3 and fmean(changed) >= MOST
        tried = max(len(new.coarse_us) + len(new.failures), new.planned)
        return (loss > LOST or is_void) and tried < len(self.target.size.configs)

    @property
    def speedup(self) -> float | None:
        """Time of the config in use over that of the best: 1 unless it is beaten; None if it was not timed."""
        if self.state in (State.SAME_CODE, State.STILL_BEST):
            return 1.0
        is_timed = self.state is State.BEATEN and self.target.current in self.times_us
        return self.times_us[self.target.current] / self.times_us[self.best] if is_timed else None

    @property
    def upgrade(self) -> float | None:
        """Time of the config in use with the older versions over its time with those installed here."""
        old, new, current = self.target.old, self.new, self.target.current
        if self.is_same_code:
            return 1.0
        if old is None or new is None:
            return None
        if current in old.coarse_us and current in new.coarse_us:
            return old.coarse_us[current] / new.coarse_us[current]
        before_us, after_us = old.times_us.get(current), self.times_us.get(current)
        return before_us / after_us if before_us and after_us else None

    @property
    def state(self) -> State:
        """The result."""
        if self.is_same_code:
            return State.SAME_CODE
        if self.best != self.target.current:
            return State.BEATEN
        if self.needs_sweep:
            return State.TO_SWEEP
        return State.NOT_REACHED if self.slowdown is None else State.STILL_BEST


@dataclass
class Recheck:
    """A recheck in progress."""

    store: Store
    plan: Plan
    targets: Sequence[Target]
    programs: dict[Program, dict[Compiler, str]] = field(default_factory=dict)
    """Machine code that is known, by compiler."""
    report: Callable[[int, int], None] = lambda done, total: None
    """Called with the number of compared launches, and of all."""
    same_code: frozenset[Problem] = frozenset()
    clock: Callable[[], float] = time.monotonic
    begun: float | None = None
    results: list[Rechecked] = field(default_factory=list)

    def run(self) -> Iterator[Event]:
        """Run all stages. Nothing is timed without a GPU. ``results`` are up to date afterwards."""
        self.compare_code()
        self._read()
        if not self.plan.backend.times:
            return
        yield from self.time_known()
        if self.plan.options.budget_s is not None:
            yield from self.sweep_lost()
            yield from self._confirm("rest", [item for item in self.results if item.state is State.STILL_BEST])
        picks.keep_current(self.store)

    def compare_code(self) -> None:
        """Compile what older measurements rest on, keep its machine code, and find the sizes where that is the same."""
        here = self.plan.backend.device
        if here.arch in ARCHES:  # one that only compiles does not name its compiler
            here = replace(here, triton=software().triton, codegen=codegen.settings())
        proofs = [target for target in self.targets if target.old and self._is_comparable(target.old, target.size)]
        known = Programs(self.programs)
        deciding = {target: configs for target in proofs if (configs := _deciding(target, known))}
        if here.arch in ARCHES:
            # The config in use first: where its code differs, that of the others proves nothing.
            known = self._compile({target: configs[:1] for target, configs in deciding.items()}, here)
            same = {target: configs for target, configs in deciding.items() if _is_same(target, known, here)}
            known = self._compile(same, here)
        self.same_code = frozenset(
            target.size.problem
            for target in proofs
            if target.old and known.is_unchanged(target.old, here) and _is_same(target, known, here)
        )

    def _compile(self, configs: Mapping[Target, Sequence[NamedInts]], here: Device) -> Programs:
        """Compile the launches whose machine code is not known here, keep it, and return all that is known then."""
        known, launches = Programs(self.programs), dict[Wanted, KernelVersion]()
        for target, size in ((target, target.size) for target in configs):
            for config in configs[target]:
                if not known.code_hash(size.problem, size.version, config, here):
                    launches[Wanted(size.reference, size.problem, config)] = size.version
        if not launches:
            return known
        compiled = compile_programs(launches, here.arch, progress=self.report, is_over=self._is_over)
        hashes = {(launches[item], item.problem, item.config): code for item, code in compiled.hashes.items()}
        self.store.keep_programs(compiled.compiler, hashes)
        for (version, problem, config), code in hashes.items():
            self.programs.setdefault((problem, version.source_hash, config), {})[compiled.compiler] = code
        return Programs(self.programs)

    def _is_comparable(self, old: Study, size: ProblemPlan) -> bool:
        """Return True if only Triton separates an older study from a measurement here."""
        driver = self.plan.backend.device.driver
        return old.source_hash == size.version.source_hash and (not driver or old.device.driver == driver)

    def _is_over(self) -> bool:
        budget_s, begun = self.plan.options.budget_s, self.begun
        return budget_s is not None and begun is not None and self.clock() > begun + budget_s

    def time_known(self) -> Iterator[Event]:
        """Time the configs in use and their rivals, and decide in fresh processes where one may be beaten."""
        timed = [target for target in self.targets if target.fresh or target.peers]
        todo = [target for target in self.targets if target not in timed and target.size.problem not in self.same_code]
        sampled = samples(self.targets)
        known = {target: [*target.known, *sampled[target]] for target in todo}
        yield from self._sweep("known", known, quick=True)
        kernels = group_by(self.results, lambda item: item.problem.kernel)
        promoted = dict(item for group in kernels.values() for item in promotions(group))
        more = {target: [*configs, *promoted[target]] for target, configs in known.items() if target in promoted}
        yield from self._sweep("promoted", more, quick=True)
        contested = [item for item in self.results if item.fails or (item.slowdown or 0.0) > CONTESTED]
        yield from self._confirm("contested", contested)

    def sweep_lost(self) -> Iterator[Event]:
        """Sweep the sizes that the known configs do not decide."""
        yield from self._sweep("lost", dict.fromkeys(item.target for item in self.results if item.needs_sweep))

    def _confirm(self, name: str, results: Iterable[Rechecked]) -> Iterator[Event]:
        """Time what is known of some sizes in fresh processes, unless that was done."""
        finalists = {item.target: item.finalists for item in results if not item.is_confirmed and item.finalists}
        yield from self._sweep(name, finalists)

    def _sweep(
        self, name: str, configs: Mapping[Target, Sequence[NamedInts] | None], *, quick: bool = False
    ) -> Iterator[Event]:
        """Sweep some configs of each size, or of all sizes whole grids (None), and read the results."""
        if not configs:
            return
        options = replace(self.plan.options, quick=quick)
        plan = replace(self.plan, key=f"{self.plan.key} {name}", options=options)  # each is resumed by itself
        if None in configs.values():
            plan = replace(plan, problems=tuple(target.size for target in configs), is_partial=False)
        else:
            sizes = [replace(item.size, configs=dict.fromkeys(some or (), "")) for item, some in configs.items()]
            plan = replace(plan, problems=tuple(sizes), is_partial=True, processes=DECISIONS)
            plan = replace(plan, coarse_rounds=COARSE_ROUNDS, rounds=ROUNDS, contender_ratio=CONTENDER_RATIO)
        yield from sweep(self.store, plan, self.clock, begun=self.begun)
        self._read()

    def _read(self) -> None:
        """Read and judge what was timed with the versions installed here."""
        plan = placed(self.store, replace(self.plan, problems=tuple(target.size for target in self.targets)))
        problems = group_by(plan.problems, plan.device_of)
        stored = {
            (study.problem, study.source_hash): study
            for device, sizes in problems.items()
            for study in self.store.studies(problems={size.problem for size in sizes}, device=device)
        }
        self.results = []
        for target in self.targets:
            version = target.size.version
            own = stored.get((target.size.problem, version.source_hash))
            is_whole = own and (target.current in own.finals or {*target.known} <= {*own.coarse_us, *own.failures})
            new = target.fresh or (own if is_whole else target.peers or own)
            if new is not None and new.finals:
                new = decide_study(replace(new, current=target.current, launched=target.size.default))
            result = Rechecked(target, new, target.size.problem in self.same_code)
            self.results.append(replace(result, needs_sweep=result.is_lost))


def samples(targets: Iterable[Target]) -> dict[Target, list[NamedInts]]:
    """Return a few more configs to time on each size, so that each that was ever near the best is timed on two sizes.

    A config that another compiler made faster is so on many sizes of its kernel, and was a rival on none of them.
    """
    chosen, counts = dict[Target, list[NamedInts]](), Counter[tuple[str, NamedInts]]()
    for target in targets:
        times_us, kernel = {} if target.old is None else target.old.coarse_us, target.size.version.kernel
        limit_us, axes = NEAR_RATIO * min(times_us.values(), default=0.0), {*target.current}
        near = [c for c, time_us in times_us.items() if time_us <= limit_us and c not in target.known and {*c} == axes]
        near = [config for config in near if counts[kernel, config] < COVER]
        near.sort(key=lambda config: (counts[kernel, config], times_us[config]))
        chosen[target] = near[:SAMPLE]
        counts.update((kernel, config) for config in (*target.known, *chosen[target]))
    return chosen


def promotions(kernel: Sequence[Rechecked]) -> Iterator[tuple[Target, list[NamedInts]]]:
    """Yield the configs that may be the fastest of a size now.

    They were near the best of the size, and changed on another one; or they are expected to be ahead of what was timed,
    because that became slower.
    """
    changes = dict[NamedInts, list[float]]()
    for item in kernel:
        for config, change in item.changes.items():
            changes.setdefault(config, []).append(change - item.middle)
    changed = {config: min(values) for config, values in changes.items() if max(map(abs, values)) >= CHANGED}
    for item in kernel:
        if not item.changes or item.new is None or item.target.old is None:
            continue
        best = math.log(min(item.new.coarse_us.values())) - item.middle
        behind = {
            config: math.log(time_us) - best + min(0.0, changed.get(config, 0.0))
            for config, time_us in item.target.old.coarse_us.items()
            if config not in item.tried and {*config} == {*item.target.current}
        }
        near = [config for config, slow in behind.items() if slow <= (NEAR if config in changed else AHEAD)]
        if near:
            yield item.target, sorted(near, key=lambda config: behind[config])[:PROMOTED]


def _is_same(target: Target, known: Programs, here: Device) -> bool:
    """Return True if the compiler of a device makes the machine code that the config in use had."""
    if target.old is None:
        return False
    launch, devices = (target.size.problem, target.size.version, target.current), (target.old.device, here)
    old, new = (known.code_hash(*launch, device) for device in devices)
    return old == new != ""


def _deciding(target: Target, known: Programs) -> list[NamedInts]:
    """Return the configs whose machine code must be the same, the one in use first; none if it is not known of all that
    decide."""
    old, size = target.old, target.size
    if old is None:
        return []
    rival = old.next_best
    deciding = [target.current, old.choice.pick, *([rival.config] if rival else [])]
    configs = dict.fromkeys([*deciding, *target.known])
    coded = [config for config in configs if known.code_hash(size.problem, size.version, config, old.device)]
    return coded if {*deciding} <= {*coded} else []
