"""``compare A..B`` on this machine: both revisions checked out, built, checked and timed against each other now.

    checkouts -> rows -> compile both sides -> compare their bytes -> stage 1, all rows -> stage 2, open rows

Yields what it is doing as it goes, and the comparison last. Nothing is stored: the rows are of two checkouts in turn,
which a database row cannot say.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8tune import scratch
from fp8tune.compare import rows as planning
from fp8tune.compare import verdicts
from fp8tune.compare.comparison import ComparedRow, Comparison, Revision
from fp8tune.compare.options import CompareOptions
from fp8tune.compare.recorded import WORKTREE, declared_hashes, parse_range
from fp8tune.compare.rows import Kernel, Plan, Row, Step
from fp8tune.compare.timing import AFTER, BEFORE, RowTimes, time_rounds
from fp8tune.compare.tree import Wanted
from fp8tune.compare.verdicts import ChangeVerdict
from fp8tune.errors import MachineError
from fp8tune.measure.engine import Backend
from fp8tune.measure.trees import Tree
from fp8tune.measure.worker import start_server
from fp8tune.plan import shapes
from fp8tune.records import Kind
from fp8tune.revisions import git, source
from fp8tune.revisions.checkouts import checkouts
from fp8tune_kernels import catalog

FREE_CONTROLS = 3
"""Rows of identical code that are timed along: unlike the control arm they use both checkouts and both caches."""


Event = Step | Comparison


def compare(options: CompareOptions, backend: Backend) -> Iterator[Event]:
    """Compare two revisions here. Closing the generator ends the workers and removes the checkouts.

    Raises UsageError for names and revisions nobody knows and for a side that cannot be built, MachineError without a
    GPU (or a simulated clock) and if git refuses.
    """
    if not backend.times:
        raise MachineError("there is no GPU here to time on: use --from-db, or --timer simulated:1")
    root = git.toplevel(options.repository)
    revisions = parse_range(root, options.revisions)
    ended, declared = _declared(options, root, *revisions)
    wanted = Wanted(
        tuple(row for name in options.shapes for row in shapes.load(name).rows),
        backend.device,
        options.routing,
        options.scale_mode,
        options.seed,
    )
    start_server()
    yield Step(f"checking out {revisions[0]} and {revisions[1]}")
    commits = [None if revision.name == WORKTREE else revision.commit for revision in revisions]
    with checkouts(root, commits) as folders, scratch.folder("cache") as cache:
        before, after = (
            Tree(str(revision), folder, cache / str(number), source.SOURCE_ROOTS)
            for number, (revision, folder) in enumerate(zip(revisions, folders, strict=True))
        )
        kernels = [
            Kernel(name, (_moved(kernel, root, before.folder), _moved(kernel, root, after.folder)), same)
            for name, kernel, same in declared
        ]
        plan = Plan(tuple(kernels), (before, after), backend, wanted, options.configs)
        comparison = Comparison(*revisions, (), origin=f"Timed in turns, --configs {options.configs}")
        yield from Run(plan, comparison, options.blind, ended).events()


def _declared(
    options: CompareOptions, root: Path, before: Revision, after: Revision
) -> tuple[list[ComparedRow], list[tuple[str, str, bool]]]:
    """Rows of kernels declared at one side only; and (name, reference, same source) of those at both."""
    rows, both = [], []
    for kernel in dict.fromkeys(options.kernels or catalog.KERNELS):
        name, hashes = declared_hashes(kernel, root, before, after, required=bool(options.kernels))
        if None not in hashes:
            both.append((name, kernel, hashes[0] == hashes[1]))
        elif hashes != (None, None):
            rows.append(ComparedRow(name, ChangeVerdict.NEW if hashes[0] is None else ChangeVerdict.REMOVED))
    return rows, both


def _moved(kernel: str, root: Path, folder: Path) -> str:
    """How workers of a checkout load a kernel: a file by its path there, all else by name."""
    path, _, attribute = kernel.rpartition(":")
    if not path.endswith(".py"):
        return kernel
    return f"{folder / Path(path).resolve().relative_to(root.resolve())}:{attribute}"


@dataclass
class Run:
    """One live comparison: goes on until each row has its verdict."""

    plan: Plan
    comparison: Comparison
    blind: bool
    ended: list[ComparedRow] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        """What is being done, and the comparison last."""
        rows: list[Row] = []
        for kernel in self.plan.kernels:
            found, alone = yield from planning.rows(self.plan, kernel)
            rows += found
            self.ended += alone
        changed, same = yield from self.sorted_by_code(rows)
        changed = yield from self.with_right_bytes(changed)
        same = yield from self.with_right_edges(same)
        if not changed:
            self._end(same, ChangeVerdict.SAME_CODE)
            yield self._finished([])
            return
        free, spared = same[:FREE_CONTROLS], same[FREE_CONTROLS:]
        self._end(spared, ChangeVerdict.SAME_CODE)
        yield from self._timed(changed, free)

    def _end(self, rows: Sequence[Row], verdict: ChangeVerdict, reason: str = "") -> None:
        self.ended += [row.ended(self.plan.wanted.device, verdict, reason) for row in rows]

    def sorted_by_code(self, rows: Sequence[Row]) -> Generator[Step, None, tuple[list[Row], list[Row]]]:
        """Rows whose code differs, and those where it does not. What does not compile before is NEW."""
        answers = yield from planning.same_code(self.plan, rows)
        changed, same = [], []
        for row, answer in zip(rows, answers, strict=True):
            if isinstance(answer, str):
                self._end([row], ChangeVerdict.NEW, answer)
            elif answer and not self.blind:
                same.append(row)
            else:
                changed.append(row)
        return changed, same

    def with_right_bytes(self, rows: list[Row]) -> Generator[Step, None, list[Row]]:
        """Rows whose bytes are right on both sides; the others end here."""
        if self.plan.backend.kind is Kind.SIMULATED or not rows:  # no kernel runs, and so none is wrong
            return rows
        ended = yield from planning.wrong_bytes(self.plan, rows)
        self.ended += [each for each in ended if each is not None]
        return [row for row, each in zip(rows, ended, strict=True) if each is None]

    def with_right_edges(self, same: list[Row]) -> Generator[Step, None, list[Row]]:
        """Rows that launch the same, less those whose edited kernel is wrong: an edge may have a binary of its own."""
        edited = {kernel.name for kernel in self.plan.kernels if not kernel.same_source}
        right = yield from self.with_right_bytes([row for row in same if row.problem.kernel in edited])
        return [row for row in same if row.problem.kernel not in edited or row in right]

    def _timed(self, changed: Sequence[Row], free: Sequence[Row]) -> Iterator[Event]:
        first = range(verdicts.STAGE_ONE_ROUNDS)
        timed = yield from self._time([*changed, *free], first)
        one, controls = timed[: len(changed)], timed[len(changed) :]
        left_open = [times for times in one if not times.failure and verdicts.is_open(verdicts.paired(times.changes))]
        second = range(first.stop, first.stop + verdicts.STAGE_TWO_ROUNDS)
        two = yield from self._time([times.row for times in left_open], second)

        arms = len(timed) + len(two)
        cleared = [times for times in one if times not in left_open]
        self.ended += [self._judged(times, 1, arms) for times in cleared]
        self.ended += [self._judged(times, len(two), arms) for times in two]
        self.ended += [self._free_control(times, arms) for times in controls]
        yield self._finished([cleared, two])

    def _time(self, rows: Sequence[Row], rounds: range) -> Generator[Step, None, list[RowTimes]]:
        return (yield from time_rounds(self.plan.backend, self.plan.trees, rows, rounds)) if rows else []

    def _judged(self, times: RowTimes, tested: int, arms: int) -> ComparedRow:
        """``tested`` rows are decided together; ``arms`` control arms are judged together."""
        row = times.row.ended(self.plan.wanted.device, ChangeVerdict.INCONCLUSIVE, times.failure)
        if times.failure:
            return row
        effect, control = verdicts.paired(times.changes), verdicts.paired(times.controls)
        return replace(
            row,
            verdict=verdicts.judge(effect, tested),
            before_us=times.time_us(BEFORE),
            after_us=times.time_us(AFTER),
            effect=effect,
            control=control,
            is_stable=verdicts.is_stable(control, arms),
            tested=tested,
            n=len(times.changes),
            blocks=times.blocks,
            stalled=times.stalled,
            throttled=times.throttled,
            slowdowns=tuple(sorted(times.slowdowns)),
        )

    def _free_control(self, times: RowTimes, arms: int) -> ComparedRow:
        """Identical code: neither the control arm nor the change itself may drift."""
        row = self._judged(times, 1, arms)
        is_stable = row.is_stable and row.effect is not None and verdicts.is_stable(row.effect, arms)
        return replace(row, verdict=ChangeVerdict.SAME_CODE, is_stable=is_stable)

    def _finished(self, stages: Sequence[Sequence[RowTimes]]) -> Comparison:
        """The comparison with its rows in order, and what all rows together say."""
        rows = tuple(sorted(self.ended, key=_order))
        whole = [kept for stage in stages if (kept := [times for times in stage if not times.failure])]
        if not whole:
            return replace(self.comparison, rows=rows)
        changes = [[times.changes for times in stage] for stage in whole]
        controls = [[times.controls for times in stage] for stage in whole]
        overall, control = verdicts.all_rows(changes, controls), verdicts.geomean(controls)
        return replace(self.comparison, rows=rows, overall=overall, control=control)


def _order(row: ComparedRow) -> tuple[str, list[tuple[str, int]], str]:
    return row.kernel, list(row.shape.items()), repr(row.problem)
