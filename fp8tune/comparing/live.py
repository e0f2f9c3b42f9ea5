"""``compare A..B`` on this machine: both revisions checked out, built, checked and timed against each other now.

    checkouts -> configs -> compile both sides -> check outputs -> stage 1, all rows -> stage 2, open rows

Nothing is stored: a result in a database cannot say that two checkouts took turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from fp8tune import scratch
from fp8tune.comparing import checkout, verdicts
from fp8tune.comparing.binaries import launched_code
from fp8tune.comparing.sides import WORKTREE, Kernel, Sides
from fp8tune.comparing.timing import AFTER, BEFORE, Launches, RowTimes, Step, time_rounds
from fp8tune.comparing.verdicts import ChangeVerdict, ComparedRow, Comparison
from fp8tune.errors import UsageError
from fp8tune.fork_server import start_server
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends import outcome_of
from fp8tune.measure.compiling import compile_edges
from fp8tune.measure.engine import Backend, Group, Schedule, measure
from fp8tune.measure.trees import Tree, within
from fp8tune.measure.worker import RemoteError, WorkerDied, WorkerPool, usable_cores
from fp8tune.plan.shapes import Selection
from fp8tune.records import Kind, NamedInts, Outcome, Problem, Status
from fp8tune.revisions import git, source
from fp8tune.stats.means import median

T = TypeVar("T")
Event = Step | Comparison
Steps = Generator[Step, None, T]

# Failures of a config that was built; any other status means that it cannot be built or launched here.
BROKEN = (Status.WRONG, Status.CRASHED, Status.TIMEOUT)

# ``--picks retune`` times this many configs of each problem and side once, then the fastest few in more rounds.
CONFIGS, CONFIRMED, CONFIRMATION_ROUNDS = 48, 6, 2


def compare(both: Sides, selections: Sequence[Selection], picks: str, backend: Backend) -> Iterator[Event]:
    """Yield each step, and last the comparison. Closing the generator ends the workers and removes the checkouts.

    Args:
        both: Revisions and kernels.
        selections: Sizes, with their routing, dtype, layout, scale and seed.
        picks: Configs of each side: its ``own``, the ``same`` (the first side's) or those found by ``retune``.
        backend: GPU, or a simulated clock.

    Raises:
        UsageError: If a side cannot be built.
        MachineError: If git refuses.
    """
    start_server()
    yield Step(f"checking out {both.before} and {both.after}")
    commits = [None if side.name == WORKTREE else side.commit for side in (both.before, both.after)]
    with git.checkouts(both.root, commits) as folders, scratch.folder("cache") as cache:
        before = Tree(str(both.before), folders[0], cache / "0", source.SOURCE_ROOTS)
        after = Tree(str(both.after), folders[1], cache / "1", source.SOURCE_ROOTS)
        yield from Session(both, (before, after), backend, tuple(selections), picks).run()


@dataclass
class Session:
    """One live comparison. Methods that take a while yield their steps."""

    sides: Sides
    trees: tuple[Tree, Tree]
    backend: Backend
    selections: tuple[Selection, ...] = ()
    picks: str = "own"
    ended: list[ComparedRow] = field(default_factory=list)
    """Rows that have their verdict."""
    added: int = 0
    removed: int = 0

    def run(self) -> Iterator[Event]:
        """Yield all steps, and last the comparison."""
        rows: list[Launches] = []
        for kernel in self.sides.kernels:
            rows += yield from self.launches(kernel)
        changed, same = yield from self.split_by_code(rows)
        changed = yield from self.with_right_outputs(changed)
        edited = {kernel.name for kernel in self.sides.kernels if kernel.is_changed}
        # identical launches of an edited kernel may still have an edge case with a binary of its own
        checked = yield from self.with_right_outputs([row for row in same if row.problem.kernel in edited])
        for row in [row for row in same if row.problem.kernel not in edited] + checked:
            self.end(row, ChangeVerdict.SAME_CODE)

        first = range(verdicts.STAGE_ONE_ROUNDS)
        stage_one = yield from time_rounds(self.backend, self.trees, changed, first)
        left_open = [
            times for times in stage_one if not times.failure and verdicts.is_open(verdicts.paired(times.changes))
        ]
        second = range(first.stop, first.stop + verdicts.STAGE_TWO_ROUNDS)
        stage_two = yield from time_rounds(self.backend, self.trees, [times.launches for times in left_open], second)
        cleared = [times for times in stage_one if times not in left_open]
        for times in [*cleared, *stage_two]:
            self.decide(times, len(stage_two) if times in stage_two else 1, controls=len(stage_one) + len(stage_two))
        yield self.comparison([cleared, stage_two])

    def launches(self, kernel: Kernel) -> Steps[list[Launches]]:
        """Return the problems that both sides have, each with its configs; count those that only one side has.

        Raises UsageError if a side does not load, and for ``--picks same`` if the axes differ.
        """
        if None in kernel.hashes:
            self.added, self.removed = self.added + (not kernel.hashes[0]), self.removed + (not kernel.hashes[1])
            return []
        yield Step(f"reading {kernel.name}")
        before, after = (
            checkout.ask(tree, checkout.declared, self.reference(kernel, side), self.selections, self.backend.device)
            for side, tree in enumerate(self.trees)
        )
        rows = [Launches(arm, after.arms[problem]) for problem, arm in before.arms.items() if problem in after.arms]
        self.added, self.removed = self.added + len(after.arms) - len(rows), self.removed + len(before.arms) - len(rows)
        if self.picks == "same":
            if any(set(row.before.config) != set(after.default) for row in rows):
                raise UsageError(f"{kernel.name} has other axes after: compare with --picks own or retune")
            return [Launches(row.before, replace(row.after, config=row.before.config)) for row in rows]
        return (yield from self.retuned(kernel, rows)) if self.picks == "retune" else rows

    def reference(self, kernel: Kernel, side: int) -> str:
        """Return the text by which workers of a side load a kernel: a file by its path in the checkout."""
        path, _, attribute = kernel.reference.rpartition(":")
        if not path.endswith(".py"):
            return kernel.reference
        return f"{self.trees[side].folder / Path(path).resolve().relative_to(self.sides.root.resolve())}:{attribute}"

    def retuned(self, kernel: Kernel, rows: Sequence[Launches]) -> Steps[list[Launches]]:
        """Return the rows with the best config of each side, found anew with an equal budget."""
        lists = []
        for side, tree in enumerate(self.trees):
            reference, arms = self.reference(kernel, side), [row[side] for row in rows]
            lists.append(checkout.ask(tree, checkout.candidates, reference, arms, self.backend.device, CONFIGS))
        if self.is_compiled:
            pairs = [(tree, arm) for tree, groups in zip(self.trees, lists, strict=True) for arm in chain(*groups)]
            yield from self.on_all_cores(pairs, launched_code, "compiling")
        tuned = []
        for number, (tree, groups) in enumerate(zip(self.trees, lists, strict=True), 1):
            yield Step(f"tuning {kernel.name}", number, len(self.trees))
            tuned.append(fastest(self.backend, tree, groups))
        return [Launches(*pair) for pair in zip(*tuned, strict=True)]

    @property
    def is_compiled(self) -> bool:
        """True if kernels are compiled ahead; a simulated clock runs none."""
        return self.backend.kind is Kind.MEASURED

    def split_by_code(self, rows: Sequence[Launches]) -> Steps[tuple[list[Launches], list[Launches]]]:
        """Return rows whose code differs, and those with the same. ``A..A`` times all, to show the noise.

        A clock that runs no kernel goes by their source. Raises UsageError if the second side does not compile.
        """
        changed, same = list[Launches](), list[Launches]()
        codes: list[str | Exception]
        if self.is_compiled:
            codes = yield from self.on_all_cores(self.arms(rows), launched_code, "compiling")
        else:
            hashes = {kernel.name: kernel.hashes for kernel in self.sides.kernels}
            codes = [f"{hashes[row.problem.kernel][side]} {arm.config}" for row in rows for side, arm in enumerate(row)]
        for row, before, after in zip(rows, codes[::2], codes[1::2], strict=True):
            if isinstance(after, Exception):
                raise self.unbuildable(row, str(after))
            if isinstance(before, Exception):
                self.added += 1
            else:
                (same if before == after and not self.sides.are_same else changed).append(row)
        return changed, same

    def arms(self, rows: Sequence[Launches]) -> list[tuple[Tree, KernelArm]]:
        """Return the launches of both sides, each with its checkout."""
        return [pair for row in rows for pair in zip(self.trees, row, strict=True)]

    def on_all_cores(
        self, arms: Sequence[tuple[Tree, KernelArm]], function: Callable[[str, Problem, NamedInts, str], T], text: str
    ) -> Steps[list[T | Exception]]:
        """Call a function that compiles each arm in its checkout; return the results, or what was raised."""
        inside: Callable[..., T] = within
        pools = {tree: WorkerPool(max(1, usable_cores() // 2)) for tree in self.trees}
        try:
            futures = []
            for tree, arm in arms:
                arguments = (arm.reference, arm.problem, arm.config, self.backend.device.arch)
                futures.append(pools[tree].submit(checkout.TIMEOUT_S, inside, tree, function, *arguments))
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

    def with_right_outputs(self, rows: Sequence[Launches]) -> Steps[list[Launches]]:
        """Return rows whose outputs are right on both sides, and end the others.

        Each side is compared with its own reference, on the problem and on every edge case that it declares. Raises
        UsageError if the second side cannot be launched.
        """
        if self.backend.kind is Kind.SIMULATED:  # no kernel runs, so none is wrong
            return [*rows]
        if self.is_compiled:
            yield from self.on_all_cores(self.arms(rows), compile_edges, "compiling edge cases")
        outcomes: list[Outcome] = []
        for side, tree in enumerate(self.trees):
            with contextlib.closing(self.backend.worker(tree)) as worker:
                for row in rows:
                    outcomes.append(worker.check(row[side]))
                    yield Step("checking outputs", len(outcomes), 2 * len(rows))
        right = []
        for row, before, after in zip(rows, outcomes[: len(rows)], outcomes[len(rows) :], strict=True):
            if before.status is Status.OK and after.status is Status.OK:
                right.append(row)
            elif Status.OUT_OF_MEMORY in (before.status, after.status):
                self.end(row, ChangeVerdict.OPEN, before.reason or after.reason)
            elif after.status is Status.OK:
                self.added += 1
            elif after.status not in BROKEN:
                raise self.unbuildable(row, after.reason)
            elif before.status is Status.OK:
                self.end(row, ChangeVerdict.WRONG, f"{after.status}: {after.reason}")
            else:
                self.end(row, ChangeVerdict.OPEN, f"right at neither side: {after.reason}")
        return right

    def unbuildable(self, row: Launches, reason: str) -> UsageError:
        """Return the error of a second side that cannot be built."""
        problem = row.problem
        return UsageError(f"{self.trees[1].name} cannot be built: {problem.kernel} {problem.shape}: {reason}")

    def end(self, row: Launches, verdict: ChangeVerdict, reason: str = "") -> ComparedRow:
        """Give a row its verdict, without times."""
        before, after = (arm.config for arm in row)
        problem, device = row.problem, self.backend.device
        ended = ComparedRow(problem.kernel, verdict, problem, device, None, None, reason, before, after)
        self.ended.append(ended)
        return ended

    def decide(self, times: RowTimes, tested: int, controls: int) -> None:
        """Give a timed row its verdict. ``tested``: rows that are decided together; ``controls``: all controls."""
        row = self.end(times.launches, ChangeVerdict.OPEN, times.failure)
        if times.failure:
            return
        effect, control = verdicts.paired(times.changes), verdicts.paired(times.controls)
        self.ended[-1] = replace(
            row,
            verdict=verdicts.decide(effect, tested),
            before_us=times.time_us(BEFORE),
            after_us=times.time_us(AFTER),
            effect=effect,
            control=control,
            is_stable=verdicts.is_stable(control, controls),
            tested=tested,
            n=len(times.changes),
            disturbances=tuple(
                f"{count} of {times.blocks} blocks: {reason}" for reason, count in sorted(times.disturbances.items())
            ),
        )

    def comparison(self, stages: Sequence[Sequence[RowTimes]]) -> Comparison:
        """Return the comparison with its rows in order, and the change over all rows."""
        rows = sorted(self.ended, key=lambda row: (row.kernel, list(row.shape.items()), repr(row.problem)))
        result = Comparison(self.sides.before, self.sides.after, tuple(rows), self.added, self.removed)
        timed = ([times for times in stage if not times.failure] for stage in stages)
        if not (whole := [stage for stage in timed if stage]):
            return result
        changes = [[times.changes for times in stage] for stage in whole]
        controls = [[times.controls for times in stage] for stage in whole]
        return replace(result, overall=verdicts.all_rows(changes, controls), control=verdicts.geomean(controls))


def fastest(backend: Backend, tree: Tree, candidates: Sequence[Sequence[KernelArm]]) -> list[KernelArm]:
    """Return the fastest of each list of one problem's arms; its first arm if none can be timed.

    All are checked and timed once in one process, the fastest few twice more in another: near-ties fall either way, on
    both sides alike.
    """
    groups: list[Group[KernelArm, dict[KernelArm, list[float]]]] = [Group({}, [*arms]) for arms in candidates]
    for processes, rounds in ((range(1), 1), (range(1, 2), CONFIRMATION_ROUNDS)):
        for turn in measure(backend, groups, Schedule(processes, rounds, trees=(tree,), is_checked=True)):
            for block in turn.blocks:
                assert block.outcome.time_us is not None
                turn.group.subject.setdefault(block.arm, []).append(block.outcome.time_us)
        for group in groups:
            group.arms = sorted(group.arms, key=lambda arm: median(group.subject.get(arm, [float("inf")])))[:CONFIRMED]
    return [(group.arms or arms)[0] for group, arms in zip(groups, candidates, strict=True)]
