"""Check of a lookup key: it must name every argument that changes which config wins.

For each key one size that has a pick is varied, in one argument at a time that the key leaves out. The pick and its
rivals are timed in turns on every variation, in fresh processes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fp8tune.check.findings import Finding, Level
from fp8tune.errors import MachineError, UsageError
from fp8tune.measure import device
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends import backend_for
from fp8tune.measure.engine import Backend, Group, Schedule, measure
from fp8tune.plan.variations import Variation, key_faults, variations
from fp8tune.records import Finalist, NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import default_of
from fp8tune.stats.decide import PLAN
from fp8tune.stats.estimate import estimate
from fp8tune.stats.pairs import Block, process_values
from fp8tune.store.layers import Reader
from fp8tune.sweeping import picks
from fp8tune.sweeping.planning import make_ready
from fp8tune_kernels.spec import KernelSpec

PROCESSES = 6
ROUNDS = 3  # in each process
RIVALS = 3  # fastest other configs of the confirmation, beside the default
ALPHA = 0.025  # chance of a false alarm in a whole check, shared by all comparisons


class KeyVerdict(StrEnum):
    """Effect of a variation on a pick."""

    HOLDS = "holds"  # the pick loses no more there than is allowed
    OPEN = "open"  # the pick seems to lose too much there, and the processes do not prove it; or time ran out
    MOVES = "moves"  # fresh processes prove that the pick loses too much there: the key lacks the argument


@dataclass(frozen=True)
class VariedSize:
    """A variation of a size, with the configs that are timed on it."""

    size: Problem
    key: NamedInts
    variation: Variation
    pick: NamedInts
    rivals: tuple[NamedInts, ...]
    allowed: float  # slowdown: what the pick lost on its own size, and one tie band more

    @property
    def argument(self) -> str:
        """Argument that is varied."""
        return self.variation.argument

    @property
    def varied_to(self) -> int | str:
        """Value of the varied argument."""
        problem = self.variation.problem
        return problem.shape[self.argument] if self.argument in problem.shape else getattr(problem, self.argument)


@dataclass(frozen=True)
class KeyPlan:
    """Measurements for one kernel. ``faults`` of the key itself leave nothing to measure."""

    reference: str
    spec: KernelSpec
    backend: Backend
    notices: tuple[str, ...]
    faults: tuple[str, ...]
    sizes: tuple[VariedSize, ...]


@dataclass(frozen=True)
class VariationResult:
    """Result of a size's pick on one variation."""

    subject: VariedSize
    slowdown: float | None  # the pick's time over that of the best rival; None if it does not run or was not timed
    best: NamedInts | None
    processes: int
    verdict: KeyVerdict
    failure: str = ""  # why the pick does not run there


def planned(reader: Reader, kernel: str) -> KeyPlan:
    """Return what to measure. Raises MachineError without a GPU, and UsageError for a kernel without picks on it."""
    backend, notices = backend_for(None, None)
    if not backend.times:
        raise MachineError(f"doctor {kernel} needs a GPU: set FP8TUNE_TIMER=simulated:1 to try it on a simulated one")
    spec = load_spec(kernel)
    finalists: dict[Problem, list[Finalist]] = {}
    for finalist in picks.finalists(reader, [spec.name], [backend.device.arch]):
        finalists.setdefault(finalist.problem, []).append(finalist)
    if not finalists:
        raise UsageError(
            f"{kernel} has no confirmed picks for {backend.device.arch}: run fp8tune sweep --kernel {kernel}"
        )
    faults = tuple(dict.fromkeys(fault for size in finalists for fault in key_faults(spec, size)))
    make_ready(backend)
    sizes: dict[NamedInts, list[VariedSize]] = {}
    for size, configs in finalists.items():
        chosen = next((finalist for finalist in configs if finalist.is_pick), None)
        if chosen is None or faults or spec.lookup_key(size) in sizes:
            continue
        others = (finalist.config for finalist in configs if finalist is not chosen)
        rivals = tuple(dict.fromkeys([*list(others)[:RIVALS], default_of(spec, size)]))
        key, allowed = spec.lookup_key(size), max(1.0, chosen.slowdown_ratio) * (1 + PLAN.tie_band)
        pick = chosen.config
        sizes[key] = [
            VariedSize(size, key, variation, pick, tuple(rival for rival in rivals if rival != pick), allowed)
            for variation in variations(spec, size)
        ]
    varied = tuple(size for group in sizes.values() for size in group)
    return KeyPlan(kernel, spec, backend, notices, faults, varied)


def run(
    plan: KeyPlan, budget_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[float | list[VariationResult]]:
    """Measure: yield the share that is done, and at last the results. Closing the generator ends the processes."""
    deadline = clock() + budget_s
    limits = device.limits(plan.backend.device)
    groups: list[Group[KernelArm, list[Block]]] = []
    failures: dict[int, str] = {}
    for index, size in enumerate(plan.sizes):
        problem, arms = size.variation.problem, []
        for config in (size.pick, *size.rivals):
            reason = plan.spec.invalid(config, plan.spec.sizes(problem), limits) if limits else None
            if reason is None:
                arms.append(KernelArm.from_spec(plan.reference, plan.spec, problem, config))
            elif config == size.pick:
                failures[index] = reason
        groups.append(Group([], arms if index not in failures else []))
    schedule = Schedule(range(1, PROCESSES + 1), ROUNDS, _in_turns, is_checked=True, is_over=lambda: clock() > deadline)
    turns = 0
    for turn in measure(plan.backend, groups, schedule):
        index = groups.index(turn.group)
        for block in turn.failed:
            if block.arm.config == plan.sizes[index].pick:
                failures[index] = block.outcome.reason or str(block.outcome.status)
                turn.group.failure = failures[index]
        for block in turn.blocks:
            if (time_us := block.outcome.time_us) is not None:
                turn.group.subject.append(Block(str(turn.process), block.place.round, block.arm.config, time_us))
        turns += bool(turn.blocks)
        yield turns / (PROCESSES * len(groups))
    comparisons = sum(len(size.rivals) for size in plan.sizes) or 1
    yield [
        decide(size, group.subject, ALPHA / comparisons, failures.get(index, ""))
        for index, (size, group) in enumerate(zip(plan.sizes, groups, strict=True))
    ]


def _in_turns(group: Group[KernelArm, list[Block]], process: int, round: int) -> Sequence[KernelArm]:
    return group.arms[::-1] if round % 2 else group.arms


def decide(size: VariedSize, blocks: Sequence[Block], alpha: float, failure: str = "") -> VariationResult:
    """Judge one variation: a one-sided t-test of log ratios, one per process, against each rival."""
    if failure:
        return VariationResult(size, None, None, 0, KeyVerdict.MOVES, failure)
    values: Mapping[NamedInts, Mapping[str, float]] = process_values(blocks) if blocks else {}
    picked, worst, best, processes, is_proven = values.get(size.pick, {}), 0.0, None, 0, False
    for rival in size.rivals:
        times = values.get(rival, {})
        ratios = [picked[process] - times[process] for process in picked if process in times]
        if len(ratios) < 2:
            continue
        result = estimate(ratios)
        processes = max(processes, len(ratios))
        is_proven |= result.lower(alpha) > math.log(size.allowed)
        if best is None or result.mean > worst:
            worst, best = result.mean, rival
    if best is None:
        return VariationResult(size, None, None, 0, KeyVerdict.OPEN)
    slowdown = max(1.0, math.exp(worst))
    holds = KeyVerdict.HOLDS if slowdown <= size.allowed else KeyVerdict.OPEN
    return VariationResult(size, slowdown, best, processes, KeyVerdict.MOVES if is_proven else holds)


def findings(plan: KeyPlan, results: Sequence[VariationResult]) -> Iterator[Finding]:
    """Yield a line for each argument that the key lacks, one for what stays open, and one for what holds."""
    for fault in plan.faults:
        yield Finding(Level.ERROR, f"lookup key of {plan.spec.name}: {fault}", "change key in the kernel's spec")
    moved: dict[str, list[VariationResult]] = {}
    for result in results:
        if result.verdict is KeyVerdict.MOVES:
            moved.setdefault(result.subject.argument, []).append(result)
    for argument, group in moved.items():
        worst = max(group, key=lambda result: math.inf if result.slowdown is None else result.slowdown)
        loss = f"does not run ({worst.failure})" if worst.slowdown is None else f"is {worst.slowdown:.2f}x slower"
        place = f"at {worst.subject.size.shape} with {argument}={worst.subject.varied_to} the pick {loss}"
        text = f"the lookup key of {plan.spec.name} lacks {argument}: {place}"
        yield Finding(Level.ERROR, text, f"add {argument} to key in the kernel's spec, then sweep again")
    counts = Counter(result.verdict for result in results)
    if count := counts[KeyVerdict.OPEN]:
        text = f"the lookup key of {plan.spec.name} stays open on {count} of {len(results)} variations"
        yield Finding(Level.WARNING, text, "run it again with a longer --budget")
    if counts[KeyVerdict.HOLDS]:
        text = f"the lookup key of {plan.spec.name} holds on {counts[KeyVerdict.HOLDS]} of {len(results)} variations"
        yield Finding(Level.OK, text)
