"""Does a kernel's lookup key hold all that moves its winner? Vary what it leaves out, and see what its pick loses.

Each problem and its variations are screened. If the pick seems to lose too much on a variation, fresh processes time it
against that variation's best alone: the screen chose that rival, so its own times would flatter it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from fp8tune import scratch
from fp8tune.errors import MachineError
from fp8tune.measure import device
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends.choice import backend_for
from fp8tune.measure.engine import Group, Schedule, measure
from fp8tune.plan import grids, problems, shapes
from fp8tune.plan.variations import Variation, key_faults, variations
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay.loading import check_reference, load_spec
from fp8tune.revisions import git
from fp8tune.stats.decide import PLAN
from fp8tune.stats.estimate import estimate
from fp8tune.stats.pairs import Block, process_values
from fp8tune.stats.study import Study
from fp8tune.store.results import Store, Tally
from fp8tune.studies import decided as decided_studies
from fp8tune.sweeping import session
from fp8tune.sweeping.events import Event
from fp8tune.sweeping.loop import sweep
from fp8tune.sweeping.options import Options
from fp8tune.sweeping.planning import Plan, ProblemPlan, fp8_dtype_of, make_ready, version_of
from fp8tune_kernels.spec import KernelSpec

PROCESSES = 6
ROUNDS = 3
"""How often a pick and its rival are timed again: so many rounds in each of so many fresh processes."""

ALPHA = 0.025
"""Chance of a false alarm in a whole lint, shared by all that is timed again."""


@dataclass(frozen=True)
class KeyedProblem:
    """A problem as a sweep would have it, and what else its lookup key stands for."""

    problem: Problem
    key: NamedInts
    variations: tuple[Variation, ...]


@dataclass(frozen=True)
class LintPlan:
    """What is measured; ``faults`` of the key itself leave nothing to measure."""

    kernel: str
    faults: tuple[str, ...]
    problems: tuple[KeyedProblem, ...]
    sweep: Plan

    @property
    def device(self) -> Device:
        """Where it is measured."""
        return self.sweep.backend.device


class KeyVerdict(StrEnum):
    """What a variation does to a winner."""

    HOLDS = "holds"
    """The key's pick loses no more there than is allowed."""
    UNCLEAR = "unclear"
    """The pick seems to lose too much there, and fresh processes do not prove it."""
    MOVES = "moves"
    """Fresh processes prove that the pick loses too much there: the key lacks the argument."""


@dataclass(frozen=True)
class VariationResult:
    """What the pick of a problem is worth on one variation of it."""

    subject: KeyedProblem
    variation: Variation
    pick: NamedInts
    best: NamedInts
    """The variation's own."""
    slowdown: float | None
    """The pick's time over the best's, on the variation; None where it does not run."""
    allowed: float
    """The pick's slowdown on the problem it was picked on, which the tie rule grants, and one tie band more."""
    processes: int = 0
    """Fresh ones that ``slowdown`` comes from; 0: the screen's was small enough."""
    is_proven: bool = False
    """Whether they prove that it is more than what is allowed."""

    @property
    def verdict(self) -> KeyVerdict:
        """Whether the variation leaves the winner where it is."""
        if self.slowdown is None or self.is_proven:
            return KeyVerdict.MOVES
        return KeyVerdict.HOLDS if self.slowdown <= self.allowed else KeyVerdict.UNCLEAR


@dataclass(frozen=True)
class Report:
    """Last event of a lint."""

    results: tuple[VariationResult, ...]
    left_out: int
    """Variations that a time budget left out."""

    @property
    def exit_code(self) -> int:
        """1 where a winner moves, 3 where that stays unclear or nothing was timed."""
        verdicts = {result.verdict for result in self.results}
        if KeyVerdict.MOVES in verdicts:
            return 1
        return 0 if verdicts == {KeyVerdict.HOLDS} else 3


def planned(options: Options) -> LintPlan:
    """Everything to measure for the one kernel of ``options`` (imports torch and the kernel).

    Raises MachineError without a GPU or simulated clock, UsageError for a kernel, grid, routing or shapes nobody knows.
    """
    (reference,) = options.kernels
    check_reference(reference)
    rows = [row for name in options.shapes for row in shapes.load(name).rows]
    backend, notices = backend_for(None, options.timer)
    if not backend.times:
        raise MachineError("lint times kernels and needs a GPU; --timer simulated:1 runs it on a fake one")
    spec, fp8_dtype = load_spec(reference), fp8_dtype_of(backend.device.arch)
    found = problems.problems(spec, rows, routing=options.routing, fp8_dtype=fp8_dtype, seed=options.seed)
    faults = tuple(dict.fromkeys(fault for problem in found for fault in key_faults(spec, problem)))
    make_ready(backend)
    keyed = () if faults else tuple(_keyed(spec, problem) for problem in found)
    plan = Plan(options, backend, f"lint {reference}", notices, commit=git.head(Path.cwd()))
    return LintPlan(spec.name, faults, keyed, replace(plan, problems=_problem_plans(plan, spec, keyed)))


def _keyed(spec: KernelSpec, problem: Problem) -> KeyedProblem:
    return KeyedProblem(problem, spec.lookup_key(problem), tuple(variations(spec, problem)))


def _problem_plans(plan: Plan, spec: KernelSpec, keyed: Sequence[KeyedProblem]) -> tuple[ProblemPlan, ...]:
    """Each problem and then its variations, so that a time budget leaves out whole problems, nearly."""
    (reference,), limits = plan.options.kernels, device.limits(plan.backend.device)
    axes, version = grids.parse_grid(plan.options.grid, spec.axes), version_of(reference, spec)
    every = dict.fromkeys(p for one in keyed for p in (one.problem, *(v.problem for v in one.variations)))
    return tuple(
        ProblemPlan.of(reference, spec, version, problem, grids.configs(spec, problem, axes, limits))
        for problem in every
    )


@contextlib.contextmanager
def opened(db: str | None) -> Iterator[Store]:
    """The database to keep rows in, or one that is gone afterwards: rows of odd variations belong in no table."""
    with contextlib.ExitStack() as stack:
        path = db or f"{stack.enter_context(scratch.folder('lint'))}/lint.db"
        yield stack.enter_context(Store.open(path, create=True))


def run(store: Store, plan: LintPlan) -> Iterator[Event | Report]:
    """Screen, time again what is unclear, and end with a Report. Closing the generator keeps every stored row."""
    yield from sweep(store, plan.sweep)
    screened = compared(plan.problems, store.studies(plan.kernel, device=plan.device))
    unclear = [result for result in screened if result.verdict is KeyVerdict.UNCLEAR]
    again = dict(zip(unclear, _timed_again(plan.sweep, unclear), strict=True))
    results = tuple(again.get(result, result) for result in screened)
    yield Report(results, sum(len(one.variations) for one in plan.problems) - len(results))


def tallies(store: Store, plan: LintPlan) -> list[Tally]:
    """Return the outcomes of each problem and variation that was begun."""
    return session.tallies(store, plan.sweep)


def compared(keyed: Sequence[KeyedProblem], studies: Sequence[Study]) -> list[VariationResult]:
    """Each pick on each variation, from studies of one device; a problem not swept to its end is left out."""
    found = {study.problem: study for study in decided_studies(studies) if study.is_usable}
    return [
        _compared(one, variation, found[one.problem], found[variation.problem])
        for one in keyed
        for variation in one.variations
        if one.problem in found and variation.problem in found
    ]


def _compared(one: KeyedProblem, variation: Variation, picked: Study, other: Study) -> VariationResult:
    pick = picked.pick.config or NamedInts()
    return VariationResult(
        subject=one,
        variation=variation,
        pick=pick,
        best=next(result.config for result in other.results if result.config is not None),
        slowdown=other.slowdowns[pick] if pick in other.times_us else None,
        allowed=picked.slowdowns[pick] * (1 + PLAN.tie_band),
    )


def _timed_again(plan: Plan, unclear: Sequence[VariationResult]) -> list[VariationResult]:
    """Each pick and its rival in turns, as fresh processes see them."""
    plans = {of.problem: of for of in plan.problems}
    groups: list[Group[KernelArm, list[Block]]] = []
    for result in unclear:
        of = plans[result.variation.problem]
        groups.append(Group([], [of.arm(result.best), of.arm(result.pick)]))
    schedule = Schedule(range(1, PROCESSES + 1), ROUNDS, _in_turns, on_failure="end")
    for turn in measure(plan.backend, groups, schedule):
        for block in turn.blocks:
            if (time_us := block.outcome.time_us) is not None:
                turn.group.subject.append(Block(str(turn.process), block.place.round, block.arm.config, time_us))
    return [decided(result, group.subject, ALPHA / len(unclear)) for result, group in zip(unclear, groups, strict=True)]


def _in_turns(group: Group[KernelArm, list[Block]], process: int, round: int) -> list[KernelArm]:
    """Forth and back."""
    return group.arms[::-1] if round % 2 else group.arms


def decided(result: VariationResult, blocks: Sequence[Block], alpha: float) -> VariationResult:
    """The result with what fresh processes timed; as it was where none timed both configs.

    One log ratio a process, and a one-sided t-test at level ``alpha`` of their mean against what is allowed.
    """
    values = process_values(blocks) if blocks else {}
    pick, best = values.get(result.pick, {}), values.get(result.best, {})
    ratios = [pick[process] - best[process] for process in pick if process in best]
    if not ratios:
        return result
    is_proven = len(ratios) > 1 and estimate(ratios).lower(alpha) > math.log(result.allowed)
    slowdown = max(1.0, math.exp(math.fsum(ratios) / len(ratios)))
    return replace(result, slowdown=slowdown, processes=len(ratios), is_proven=is_proven)
