"""``compare A..B`` on this machine: both revisions are built, checked and timed against each other now.

    configs -> compile both sides -> check outputs -> stage 1, all rows -> stage 2, open rows

Nothing is stored: a result in a database cannot say that two checkouts took turns.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from fp8tune.comparing import checkout, outputs, verdicts
from fp8tune.comparing.agreement import Pair, compare_pairs, urgency
from fp8tune.comparing.calls import Call, answers, call
from fp8tune.comparing.checkout import launched_code
from fp8tune.comparing.rounds import AFTER, CONTROL, Report, Row, time_rounds
from fp8tune.comparing.sides import Kernel, Sides, trees
from fp8tune.comparing.verdicts import ChangeVerdict, Comparison
from fp8tune.errors import UsageError
from fp8tune.fork_server import start_server
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends import ProcessBackend
from fp8tune.measure.compiling import compile_edges
from fp8tune.measure.engine import Backend, Group, Schedule, measure
from fp8tune.measure.trees import Tree
from fp8tune.plan.shapes import Selection
from fp8tune.records import Kind, NamedInts, Outcome, Status
from fp8tune.stats.means import median

T = TypeVar("T")

CHECKED_CONFIGS = 4  # of the second side on each small input, where Triton's interpreter runs

# ``--picks retune`` times this many configs of each problem and side once, then the fastest few in more rounds.
CONFIGS, CONFIRMED, CONFIRMATION_ROUNDS = 48, 6, 2


def compare(
    sides: Sides,
    selections: Sequence[Selection],
    picks: str,
    backend: Backend,
    report: Report,
    *,
    outputs_only: bool = False,
) -> Comparison:
    """Build, check and time both sides; on Triton's interpreter, or with ``outputs_only``, nothing is timed.

    Args:
        sides: Revisions and kernels.
        selections: Sizes, with their routing, dtype, layout, scale and seed.
        picks: Configs of each side: its ``own``, the ``same`` (the first side's) or those found by ``retune``.
        backend: GPU, Triton's interpreter or a simulated clock.
        report: Called at each step.
        outputs_only: True if outputs are all that is asked: a size on which they agree is not OPEN.

    Raises:
        UsageError: If a side cannot be loaded, or nothing is timed and ``picks`` are to be retuned.
    """
    if (not backend.times or outputs_only) and picks == "retune":
        raise UsageError("--picks retune times configs, and nothing is timed here: use own or same")
    if backend.kind is Kind.INTERPRETER:
        os.environ["TRITON_INTERPRET"] = "1"  # before any worker starts: Triton reads it when it is imported
    start_server()
    with trees(sides) as both:
        return Session(sides, both, backend, report, outputs_only).run(selections, picks)


@dataclass
class Session:
    """One live comparison."""

    sides: Sides
    trees: tuple[Tree, Tree]
    backend: Backend
    report: Report
    outputs_only: bool = False
    rows: list[Row] = field(default_factory=list)
    added: int = 0
    removed: int = 0

    def run(self, selections: Sequence[Selection], picks: str) -> Comparison:
        """Compare all kernels."""
        for kernel in self.sides.kernels:
            self.rows += self.load(kernel, selections, picks)
        same = self.with_same_code()
        # identical launches of an edited kernel may still have an edge case with a binary of its own
        edited = {kernel.name for kernel in self.sides.kernels if kernel.is_changed}
        unchecked = [row for row in self.rows if row not in same or row.problem.kernel in edited]
        self.check([row for row in unchecked if row.verdict is None])
        for row in same:
            row.verdict = row.verdict or ChangeVerdict.SAME_CODE
        if self.outputs_only or not self.backend.times:
            verdict = ChangeVerdict.AGREE if self.outputs_only else ChangeVerdict.OPEN
            for row in self.rows:
                if row.verdict is None:
                    row.end(verdict, verdicts.AGREED)
        stage_one = [row for row in self.rows if row.verdict is None]
        rounds = range(verdicts.STAGE_ONE_ROUNDS)
        time_rounds(self.backend, self.trees, stage_one, rounds, self.report)
        timed = [row for row in stage_one if row.verdict is None]
        stage_two = [row for row in timed if verdicts.is_open(verdicts.paired(row.changes()))]
        for row in stage_two:  # they are decided on later rounds alone
            row.logs, row.blocks, row.disturbances = [], 0, Counter()
        rounds = range(rounds.stop, rounds.stop + verdicts.STAGE_TWO_ROUNDS)
        time_rounds(self.backend, self.trees, stage_two, rounds, self.report)
        cleared = [row for row in timed if row not in stage_two]
        return self.comparison(cleared, stage_two, controls=len(stage_one) + len(stage_two))

    def load(self, kernel: Kernel, selections: Sequence[Selection], picks: str) -> list[Row]:
        """Return the problems that both sides have, each with its configs; count those that only one side has.

        Raises UsageError if a side does not load, and for ``--picks same`` if the axes differ.
        """
        if None in kernel.hashes:
            self.added, self.removed = self.added + (not kernel.hashes[0]), self.removed + (not kernel.hashes[1])
            return []
        arguments = selections, self.backend.device
        (axes, before), (new_axes, after) = self.call_both(kernel, checkout.launches, [arguments] * 2)
        rows = [Row(before[problem], after[problem]) for problem in before if problem in after]
        self.added, self.removed = self.added + len(after) - len(rows), self.removed + len(before) - len(rows)
        if picks == "same" and axes != new_axes:
            raise UsageError(f"{kernel.name} has other axes after: compare with --picks own or retune")
        if picks == "same":
            return [Row(row.before, replace(row.after, config=row.before.config)) for row in rows]
        return self.retuned(kernel, rows) if picks == "retune" else rows

    def retuned(self, kernel: Kernel, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with the best config of each side, found anew with an equal budget."""
        arguments = [([row.arms[side] for row in rows], self.backend.device, CONFIGS) for side in range(2)]
        lists = self.call_both(kernel, checkout.candidates, arguments)
        if self.backend.kind is Kind.MEASURED:
            pairs = [(tree, arm) for tree, groups in zip(self.trees, lists, strict=True) for arm in chain(*groups)]
            self.compiled(pairs, launched_code, "compiling")
        tuned = []
        for number, (tree, groups) in enumerate(zip(self.trees, lists, strict=True), 1):
            self.report(f"tuning {kernel.name}", number, len(self.trees))
            tuned.append(fastest(self.backend, tree, groups))
        return [Row(*pair) for pair in zip(*tuned, strict=True)]

    def with_same_code(self) -> list[Row]:
        """Return rows whose sides run the same code, and drop rows whose first side does not compile.

        ``A..A`` has none, to show the noise. Without a GPU their source is compared. A row whose second side does not
        compile is WRONG.
        """
        if self.backend.kind is Kind.MEASURED:
            codes: Sequence[object] = self.compiled(self.all_arms(self.rows), launched_code, "compiling")
        else:
            hashes = {kernel.name: kernel.hashes for kernel in self.sides.kernels}
            codes = [(hashes[row.problem.kernel][n], arm.config) for row in self.rows for n, arm in enumerate(row.arms)]
        same = []
        for row, before, after in zip([*self.rows], codes[::2], codes[1::2], strict=True):
            if isinstance(before, UsageError):
                self.drop(row)
            elif isinstance(after, UsageError):
                row.end(ChangeVerdict.WRONG, str(after))
            elif before == after and not self.sides.are_same:
                same.append(row)
        return same

    def check(self, rows: Sequence[Row]) -> None:
        """End or drop rows whose outputs are wrong, or other than the first side's.

        On a GPU each side is first compared with its own reference on the row's own size.
        """
        if self.backend.kind is Kind.SIMULATED:  # no kernel runs
            return
        if self.backend.kind is Kind.MEASURED:
            self.compiled(self.all_arms(rows), compile_edges, "compiling edge cases")
            outcomes: list[list[Outcome]] = [[], []]
            for side, tree in enumerate(self.trees):
                with contextlib.closing(self.backend.worker(tree)) as worker:
                    for row in rows:
                        outcome = worker.check(row.arms[side])
                        outcomes[side].append(replace(outcome, reason="") if outcome.status is Status.OK else outcome)
                        self.report("checking outputs", sum(map(len, outcomes)), 2 * len(rows))
            for row, before, after in zip(rows, *outcomes, strict=True):
                self.judge(row, before, after)
        self.compare_outputs([row for row in rows if row.verdict is None and row in self.rows])

    def judge(self, row: Row, before: Outcome, after: Outcome) -> None:
        """End or drop a row by the outcomes of both sides. What is ``ok`` with a reason cannot be compared."""
        was_right, is_right = before.status is Status.OK, after.status is Status.OK
        if Status.OUT_OF_MEMORY in (before.status, after.status):
            row.end(ChangeVerdict.OPEN, before.reason or after.reason)
        elif is_right and not was_right:
            self.drop(row)
        elif was_right and not is_right:
            row.end(ChangeVerdict.WRONG, f"{after.status}: {after.reason}")
        elif not is_right:
            row.end(ChangeVerdict.OPEN, f"wrong on both sides: {after.reason}")
        elif after.reason:
            row.end(ChangeVerdict.OPEN, after.reason)

    def compare_outputs(self, rows: Sequence[Row]) -> None:
        """Compare both sides on small inputs, with their references and with each other, and judge the rows.

        On the interpreter, a few other configs of the second side are compared, too.
        """
        assert isinstance(self.backend, ProcessBackend)
        calls = [(tree, name_of(arm), (arm, self.backend.torch_device)) for tree, arm in self.all_arms(rows)]
        inputs = self.answers(calls, outputs.inputs_of, "reading edge cases")
        configs: list[list[NamedInts]] = [[] for _ in rows]
        if self.backend.kind is Kind.INTERPRETER:
            lists = self.answers(
                [
                    (self.trees[1], name_of(arm), (arm.reference, [arm], self.backend.device, CHECKED_CONFIGS))
                    for arm in (row.after for row in rows)
                ],
                checkout.candidates,
                "reading configs",
            )
            configs = [
                [arm.config for arm in candidates if arm.config != row.after.config]
                for row, (candidates,) in zip(rows, lists, strict=True)
            ]
        pairs = list[dict[Pair, bool]]()
        for row, others, first, second in zip(rows, configs, inputs[::2], inputs[1::2], strict=True):
            required = {edge: first.get(edge, False) or second.get(edge, False) for edge in (*first, *second)}
            pairs.append({Pair.on(edge, *row.arms, others): is_required for edge, is_required in required.items()})
        results = compare_pairs(self.backend, self.trees, list(dict.fromkeys(chain(*pairs))), self.report)
        for row, on_inputs in zip(rows, pairs, strict=True):
            known = [
                results[pair]
                for pair, is_required in on_inputs.items()
                if is_required or results[pair][0].status is Status.OK
            ]
            if known:
                self.judge(row, *min(known, key=urgency))
            else:
                row.end(ChangeVerdict.OPEN, "too large for Triton's interpreter")

    def all_arms(self, rows: Sequence[Row]) -> list[tuple[Tree, KernelArm]]:
        """Return the launches of both sides, each with its checkout."""
        return [pair for row in rows for pair in zip(self.trees, row.arms, strict=True)]

    def drop(self, row: Row) -> None:
        """Count a row that only the second side gets right as added."""
        self.rows.remove(row)
        self.added += 1

    def comparison(self, cleared: Sequence[Row], stage_two: Sequence[Row], controls: int) -> Comparison:
        """Return all rows in order, and the change over those that were timed."""
        device, tested = self.backend.device, {row: len(stage_two) for row in stage_two}
        rows = [row.result(device, tested.get(row, 1), controls).of_kind(self.backend.kind) for row in self.rows]
        rows.sort(key=lambda row: (row.kernel, list(row.shape.items()), repr(row.problem)))
        result = Comparison(self.sides.before, self.sides.after, tuple(rows), self.added, self.removed)
        stages = [timed for stage in (cleared, stage_two) if (timed := [row for row in stage if row.verdict is None])]
        if not stages:
            return result
        changes, drifts = ([[row.changes(seat) for row in stage] for stage in stages] for seat in (AFTER, CONTROL))
        return replace(result, overall=verdicts.all_rows(changes, drifts), control=verdicts.geomean(drifts))

    def compiled(
        self, arms: Iterable[tuple[Tree, KernelArm]], function: Callable[..., T], text: str
    ) -> list[T | UsageError]:
        """Call a function that compiles each arm in its checkout; return the results, or errors."""
        arch = self.backend.device.arch
        calls = [(tree, name_of(arm), (arm.reference, arm.problem, arm.config, arch)) for tree, arm in arms]
        return self.call(calls, function, text)

    def call(self, calls: Sequence[Call], function: Callable[..., T], text: str) -> list[T | UsageError]:
        """Call a function in each checkout; return the results, or errors."""
        return call(self.trees, calls, function, lambda done: self.report(text, done, len(calls)))

    def answers(self, calls: Sequence[Call], function: Callable[..., T], text: str) -> list[T]:
        """Call a function in each checkout. Raises the first UsageError."""
        return answers(self.call(calls, function, text))

    def call_both(self, kernel: Kernel, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        """Call a function with the reference and the arguments of each side. Raises the first UsageError."""
        sides = zip(self.trees, kernel.references, arguments, strict=True)
        calls = [(tree, kernel.name, (reference, *values)) for tree, reference, values in sides]
        return self.answers(calls, function, f"reading {kernel.name}")


def name_of(arm: KernelArm) -> str:
    """Return the kernel and the sizes of an arm, for messages."""
    return f"{arm.problem.kernel} {arm.problem.shape}"


def fastest(backend: Backend, tree: Tree, candidates: Sequence[Sequence[KernelArm]]) -> list[KernelArm]:
    """Return the fastest arm in each list for one problem; the first if none can be timed.

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
