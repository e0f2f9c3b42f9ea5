"""The rows of a live comparison: problems, configs, and the verdicts that need no timing of two sides.

These are rows of one side only, identical code and wrong bytes. Code that cannot be built ends the comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from fp8tune.comparing import tree
from fp8tune.comparing.binaries import launched_code
from fp8tune.comparing.comparison import ComparedRow
from fp8tune.comparing.options import CompareOptions, Configs
from fp8tune.comparing.sides import Kernel, Sides
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.errors import UsageError
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends.processes import outcome_of
from fp8tune.measure.compiling import compile_edges
from fp8tune.measure.engine import Backend, Group, Schedule, measure
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, WorkerDied, WorkerPool, usable_cores
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Status
from fp8tune.stats.means import median

T = TypeVar("T")

BROKEN = (Status.WRONG, Status.CRASHED, Status.TIMEOUT)
"""Failures of a config that was built; any other status means that it cannot be built or launched here."""

CONFIGS = 48
"""Configs that ``--configs retune`` times on each problem and side: the default, the table's, a seeded choice."""
FINALISTS = 6
FINAL_ROUNDS = 2


@dataclass(frozen=True)
class Step:
    """Progress of a comparison; ``total`` is 0 for a step without parts. ``left_s``: seconds to its end, if known."""

    text: str
    done: int = 0
    total: int = 0
    left_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """Kernels and ``rows`` of all shape sets to compare, the checkouts, and the clock."""

    options: CompareOptions
    sides: Sides
    trees: tuple[Tree, Tree]
    backend: Backend
    rows: tuple[NamedInts, ...]

    @property
    def device(self) -> Device:
        """The backend's device."""
        return self.backend.device

    @property
    def compiles(self) -> bool:
        """True if kernels are compiled ahead; the simulated clock runs none."""
        return self.backend.kind is Kind.MEASURED

    def reference(self, kernel: Kernel, side: int) -> str:
        """Return the text by which workers of a side load a kernel: a file by its path in the checkout."""
        path, _, attribute = kernel.reference.rpartition(":")
        if not path.endswith(".py"):
            return kernel.reference
        return f"{self.trees[side].folder / Path(path).resolve().relative_to(self.sides.root.resolve())}:{attribute}"


class Row(NamedTuple):
    """One problem of one kernel, and the launch of each side, in the order of the trees."""

    before: KernelArm
    after: KernelArm

    @property
    def problem(self) -> Problem:
        """The problem, which is the same on both sides."""
        return self.before.problem

    def ended(self, device: Device, verdict: ChangeVerdict, reason: str = "") -> ComparedRow:
        """Return the row as it is reported, without times."""
        before, after = (arm.config for arm in self)
        return ComparedRow(self.problem.kernel, verdict, self.problem, device, None, None, reason, before, after)


Settled = tuple[list[Row], list[ComparedRow]]
"""Rows that go on, and those that have their verdict."""


def rows(plan: Plan, kernel: Kernel) -> Generator[Step, None, Settled]:
    """Return the problems that both sides have, each with its configs; and the rows that one side alone has.

    Raises UsageError if a side does not load, and for ``--configs same`` if the axes differ.
    """
    if None in kernel.hashes:
        return [], [ComparedRow(kernel.name, kernel.verdict or ChangeVerdict.NO_ROWS)]
    yield Step(f"reading {kernel.name}")
    before, after = (
        tree.ask(checkout, tree.declared, plan.reference(kernel, side), plan.options, plan.rows, plan.device)
        for side, checkout in enumerate(plan.trees)
    )
    alone = [(ChangeVerdict.REMOVED, problem) for problem in before.arms if problem not in after.arms]
    alone += [(ChangeVerdict.NEW, problem) for problem in after.arms if problem not in before.arms]
    ended = [ComparedRow(kernel.name, verdict, problem, plan.device) for verdict, problem in alone]
    both = [Row(arm, after.arms[problem]) for problem, arm in before.arms.items() if problem in after.arms]
    if plan.options.configs is Configs.SAME:
        if any(set(row.before.config) != set(after.default) for row in both):
            raise UsageError(f"{kernel.name} has other axes after: compare with --configs own or retune")
        both = [Row(row.before, replace(row.after, config=row.before.config)) for row in both]
    elif plan.options.configs is Configs.RETUNE:
        both = yield from _retuned(plan, kernel, both)
    return both, ended


def _retuned(plan: Plan, kernel: Kernel, rows: Sequence[Row]) -> Generator[Step, None, list[Row]]:
    candidates: list[list[list[KernelArm]]] = []
    for side, checkout in enumerate(plan.trees):
        reference, arms = plan.reference(kernel, side), [row[side] for row in rows]
        candidates.append(tree.ask(checkout, tree.candidates, reference, arms, plan.device, CONFIGS))
    by_tree = list(zip(plan.trees, candidates, strict=True))
    if plan.compiles:
        every = [(checkout, arm) for checkout, lists in by_tree for arm in chain.from_iterable(lists)]
        yield from _on_all_cores(plan, every, launched_code, "compiling")
    tuned: list[list[KernelArm]] = []
    for checkout, lists in by_tree:
        yield Step(f"tuning {kernel.name}", len(tuned) + 1, len(plan.trees))
        tuned.append(retuned(plan.backend, checkout, lists))
    return [Row(*arms) for arms in zip(*tuned, strict=True)]


def retuned(backend: Backend, checkout: Tree, candidates: Sequence[Sequence[KernelArm]]) -> list[KernelArm]:
    """Return the fastest of each list of one problem's arms; its first arm if none can be timed.

    All are checked and timed once in one process, the fastest few twice more in another: near-ties fall either way, on
    both sides alike.
    """
    groups: list[Group[KernelArm, dict[KernelArm, list[float]]]] = [Group({}, [*arms]) for arms in candidates]
    for processes, rounds in ((range(1), 1), (range(1, 2), FINAL_ROUNDS)):
        for turn in measure(backend, groups, Schedule(processes, rounds, trees=(checkout,), is_checked=True)):
            for block in turn.blocks:
                assert block.outcome.time_us is not None
                turn.group.subject.setdefault(block.arm, []).append(block.outcome.time_us)
        for group in groups:
            group.arms = sorted(group.arms, key=lambda arm: median(group.subject.get(arm, [float("inf")])))[:FINALISTS]
    return [(group.arms or arms)[0] for group, arms in zip(groups, candidates, strict=True)]


def by_code(plan: Plan, rows: Sequence[Row]) -> Generator[Step, None, tuple[list[Row], list[Row], list[ComparedRow]]]:
    """Return rows whose code differs, those with the same code, and NEW ones, which do not compile before.

    A clock that runs no kernel goes by the kernels' text. Raises UsageError if the second side does not compile.
    """
    changed, same, ended = list[Row](), list[Row](), list[ComparedRow]()
    codes: list[str | Exception]
    if plan.compiles:
        codes = yield from _on_all_cores(plan, _arms(plan, rows), launched_code, "compiling")
    else:
        texts = {kernel.name: kernel.hashes for kernel in plan.sides.kernels}
        codes = [f"{texts[row.problem.kernel][side]} {arm.config}" for row in rows for side, arm in enumerate(row)]
    for row, before, after in zip(rows, codes[::2], codes[1::2], strict=True):
        if isinstance(after, Exception):
            raise _cannot_be_built(plan, row, str(after))
        if isinstance(before, Exception):
            ended.append(row.ended(plan.device, ChangeVerdict.NEW, f"does not compile before: {before}"))
        else:
            (same if before == after and not plan.options.blind else changed).append(row)
    return changed, same, ended


def _arms(plan: Plan, rows: Sequence[Row]) -> list[tuple[Tree, KernelArm]]:
    return [pair for row in rows for pair in zip(plan.trees, row, strict=True)]


def _on_all_cores(
    plan: Plan,
    arms: Sequence[tuple[Tree, KernelArm]],
    function: Callable[[str, Problem, NamedInts, str], T],
    text: str,
) -> Generator[Step, None, list[T | Exception]]:
    """Call a function that compiles each arm in its tree; return the results, or what was raised."""
    inside: Callable[..., T] = within
    pools = {checkout: WorkerPool(max(1, usable_cores() // 2)) for checkout in plan.trees}
    try:
        futures = []
        for checkout, arm in arms:
            arguments = (arm.reference, arm.problem, arm.config, plan.device.arch)
            futures.append(pools[checkout].submit(tree.TIMEOUT_S, inside, checkout, function, *arguments))
        results: list[T | Exception] = []
        for number, future in enumerate(futures, 1):
            try:
                results.append(future.result())
            except (WorkerDied, RemoteError) as error:
                results.append(RuntimeError(outcome_of(error).reason))
            yield Step(text, number, len(futures))
        return results
    finally:
        for pool in pools.values():
            pool.close()


def _cannot_be_built(plan: Plan, row: Row, reason: str) -> UsageError:
    return UsageError(f"{plan.trees[1].name} cannot be built: {row.problem.kernel} {row.problem.shape}: {reason}")


def with_right_bytes(plan: Plan, rows: Sequence[Row]) -> Generator[Step, None, Settled]:
    """Return rows whose bytes are right on both sides, and the others with their verdicts.

    Each side is compared with its own reference, on the problem and on every edge that it declares. Raises UsageError
    if the second side cannot be launched.
    """
    if plan.backend.kind is Kind.SIMULATED:  # no kernel runs, and so none is wrong
        return [*rows], []
    if plan.compiles:
        yield from _on_all_cores(plan, _arms(plan, rows), compile_edges, "compiling edges")
    outcomes: list[Outcome] = []
    for side, checkout in enumerate(plan.trees):
        with contextlib.closing(plan.backend.worker(checkout)) as worker:
            for row in rows:
                outcomes.append(worker.check(row[side]))
                yield Step("checking bytes", len(outcomes), 2 * len(rows))
    right, ended = list[Row](), list[ComparedRow]()
    for row, before, after in zip(rows, outcomes[: len(rows)], outcomes[len(rows) :], strict=True):
        if before.status is Status.OK and after.status is Status.OK:
            right.append(row)
        else:
            ended.append(_not_right(plan, row, before, after))
    return right, ended


def with_right_edges(plan: Plan, same: Sequence[Row]) -> Generator[Step, None, Settled]:
    """Check rows with the same code, if their kernel was edited: an edge may have a binary of its own."""
    edited = {kernel.name for kernel in plan.sides.kernels if kernel.verdict is None}
    right, ended = yield from with_right_bytes(plan, [row for row in same if row.problem.kernel in edited])
    return [row for row in same if row.problem.kernel not in edited or row in right], ended


def _not_right(plan: Plan, row: Row, before: Outcome, after: Outcome) -> ComparedRow:
    if Status.OUT_OF_MEMORY in (before.status, after.status):
        verdict, reason = ChangeVerdict.INCONCLUSIVE, before.reason or after.reason
    elif after.status is Status.OK:
        verdict, reason = ChangeVerdict.NEW, f"not right before ({before.status}): {before.reason}"
    elif after.status not in BROKEN:
        raise _cannot_be_built(plan, row, after.reason)
    elif before.status is Status.OK:
        verdict, reason = ChangeVerdict.NEWLY_WRONG, f"{after.status}: {after.reason}"
    else:
        verdict, reason = ChangeVerdict.INCONCLUSIVE, f"right at neither side: {after.reason}"
    return row.ended(plan.device, verdict, reason)
