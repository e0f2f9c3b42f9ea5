"""``compare A..B`` on this machine: both revisions checked out, built, checked and timed against each other now.

    checkouts -> rows -> compile both sides -> compare their bytes -> stage 1, all rows -> stage 2, open rows

Yields what it is doing as it goes, and the comparison last. Nothing is stored: the rows are of two checkouts in turn,
which a database row cannot say.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fp8tune import scratch
from fp8tune.compare import rows as planning
from fp8tune.compare import verdicts
from fp8tune.compare.comparison import ComparedRow, Comparison
from fp8tune.compare.options import CompareOptions
from fp8tune.compare.rows import Plan, Row, Step
from fp8tune.compare.sides import WORKTREE, sides
from fp8tune.compare.timing import AFTER, BEFORE, RowTimes, time_rounds
from fp8tune.compare.verdicts import ChangeVerdict
from fp8tune.errors import MachineError
from fp8tune.measure.engine import Backend
from fp8tune.measure.trees import Tree
from fp8tune.measure.worker import start_server
from fp8tune.plan import shapes
from fp8tune.records import Kind
from fp8tune.revisions import source
from fp8tune.revisions.checkouts import checkouts

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
    both = sides(options.repository, options.revisions, options.kernels)
    rows = tuple(row for name in options.shapes for row in shapes.load(name).rows)
    start_server()
    yield Step(f"checking out {both.before} and {both.after}")
    revisions = (both.before, both.after)
    commits = [None if revision.name == WORKTREE else revision.commit for revision in revisions]
    with checkouts(both.root, commits) as folders, scratch.folder("cache") as cache:
        before, after = (
            Tree(str(revision), folder, cache / str(number), source.SOURCE_ROOTS)
            for number, (revision, folder) in enumerate(zip(revisions, folders, strict=True))
        )
        yield from Run(Plan(options, both, (before, after), backend, rows)).events()


@dataclass
class Run:
    """One live comparison: goes on until each row has its verdict."""

    plan: Plan
    ended: list[ComparedRow] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        """What is being done, and the comparison last."""
        rows: list[Row] = []
        for kernel in self.plan.sides.kernels:
            if None in kernel.hashes:
                self.ended.append(ComparedRow(kernel.name, kernel.verdict or ChangeVerdict.NO_ROWS))
                continue
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
        self.ended += [row.ended(self.plan.device, verdict, reason) for row in rows]

    def sorted_by_code(self, rows: Sequence[Row]) -> Generator[Step, None, tuple[list[Row], list[Row]]]:
        """Rows whose code differs, and those where it does not. What does not compile before is NEW."""
        answers = yield from planning.same_code(self.plan, rows)
        changed, same = [], []
        for row, answer in zip(rows, answers, strict=True):
            if isinstance(answer, str):
                self._end([row], ChangeVerdict.NEW, answer)
            elif answer and not self.plan.options.blind:
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
        edited = {kernel.name for kernel in self.plan.sides.kernels if kernel.verdict is None}
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
        row = times.row.ended(self.plan.device, ChangeVerdict.INCONCLUSIVE, times.failure)
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
        both, rows = self.plan.sides, tuple(sorted(self.ended, key=_order))
        origin = f"Timed in turns, --configs {self.plan.options.configs}"
        whole = [kept for stage in stages if (kept := [times for times in stage if not times.failure])]
        if not whole:
            return Comparison(both.before, both.after, rows, origin=origin)
        changes = [[times.changes for times in stage] for stage in whole]
        controls = [[times.controls for times in stage] for stage in whole]
        overall, control = verdicts.all_rows(changes, controls), verdicts.geomean(controls)
        return Comparison(both.before, both.after, rows, overall, control, origin)


def _order(row: ComparedRow) -> tuple[str, list[tuple[str, int]], str]:
    return row.kernel, list(row.shape.items()), repr(row.problem)
