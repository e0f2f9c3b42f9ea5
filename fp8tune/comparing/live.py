"""``compare A..B`` on this machine: both revisions checked out, built, checked and timed against each other now.

    checkouts -> rows -> compile both sides -> compare their bytes -> stage 1, all rows -> stage 2, open rows

Nothing is stored: a database row cannot say that two checkouts took turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8tune import scratch
from fp8tune.comparing import rows as planning
from fp8tune.comparing import verdicts
from fp8tune.comparing.comparison import ComparedRow, Comparison
from fp8tune.comparing.options import CompareOptions
from fp8tune.comparing.rows import Plan, Row, Step
from fp8tune.comparing.sides import WORKTREE, sides
from fp8tune.comparing.timing import AFTER, BEFORE, RowTimes, time_rounds
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.errors import MachineError
from fp8tune.fork_server import start_server
from fp8tune.measure.engine import Backend
from fp8tune.measure.trees import Tree
from fp8tune.plan import shapes
from fp8tune.revisions import git, source

FREE_CONTROLS = 3
"""Rows of identical code that are timed along: unlike the control arm they use both checkouts and both caches."""

Event = Step | Comparison


def compare(options: CompareOptions, backend: Backend) -> Iterator[Event]:
    """Yield each step, and last the comparison. Closing the generator ends the workers and removes the checkouts.

    Raises UsageError for names and revisions nobody knows and for a side that cannot be built, MachineError without a
    GPU (or a simulated clock) and if git refuses.
    """
    if not backend.times:
        raise MachineError("there is no GPU here to time on: use --from-db, or --timer simulated:1")
    both = sides(options.repository, options.revisions, options.kernels)
    rows = tuple(row for name in options.shapes for row in shapes.load(name).rows)
    start_server()
    yield Step(f"checking out {both.before} and {both.after}")
    commits = [None if side.name == WORKTREE else side.commit for side in (both.before, both.after)]
    with git.checkouts(both.root, commits) as folders, scratch.folder("cache") as cache:
        before = Tree(str(both.before), folders[0], cache / "0", source.SOURCE_ROOTS)
        after = Tree(str(both.after), folders[1], cache / "1", source.SOURCE_ROOTS)
        yield from _events(Plan(options, both, (before, after), backend, rows))


def _events(plan: Plan) -> Iterator[Event]:
    rows, ended = list[Row](), list[ComparedRow]()
    for kernel in plan.sides.kernels:
        both, alone = yield from planning.rows(plan, kernel)
        rows += both
        ended += alone
    changed, same, not_compiled = yield from planning.by_code(plan, rows)
    changed, wrong = yield from planning.with_right_bytes(plan, changed)
    same, wrong_edges = yield from planning.with_right_edges(plan, same)
    free = same[:FREE_CONTROLS] if changed else []
    ended += [*not_compiled, *wrong, *wrong_edges]
    ended += [row.ended(plan.device, ChangeVerdict.SAME_CODE) for row in same[len(free) :]]

    first = range(verdicts.STAGE_ONE_ROUNDS)
    timed = yield from time_rounds(plan.backend, plan.trees, [*changed, *free], first)
    one, controls = timed[: len(changed)], timed[len(changed) :]
    left_open = [times for times in one if not times.failure and verdicts.is_open(verdicts.paired(times.changes))]
    second = range(first.stop, first.stop + verdicts.STAGE_TWO_ROUNDS)
    two = yield from time_rounds(plan.backend, plan.trees, [times.row for times in left_open], second)

    arms = len(timed) + len(two)
    cleared = [times for times in one if times not in left_open]
    ended += [_decided(plan, times, 1, arms) for times in cleared]
    ended += [_decided(plan, times, len(two), arms) for times in two]
    ended += [_free_control(plan, times, arms) for times in controls]
    yield _finished(plan, ended, [cleared, two])


def _decided(plan: Plan, times: RowTimes, tested: int, arms: int) -> ComparedRow:
    """Return a row with its verdict. ``tested``: rows that are decided together; ``arms``: all control arms."""
    row = times.row.ended(plan.device, ChangeVerdict.INCONCLUSIVE, times.failure)
    if times.failure:
        return row
    effect, control = verdicts.paired(times.changes), verdicts.paired(times.controls)
    return replace(
        row,
        verdict=verdicts.decide(effect, tested),
        before_us=times.time_us(BEFORE),
        after_us=times.time_us(AFTER),
        effect=effect,
        control=control,
        is_stable=verdicts.is_stable(control, arms),
        tested=tested,
        n=len(times.changes),
        blocks=times.blocks,
        ungated=times.ungated,
        throttled=times.throttled,
        slowdowns=tuple(sorted(times.slowdowns)),
    )


def _free_control(plan: Plan, times: RowTimes, arms: int) -> ComparedRow:
    """Return a row of identical code: neither the control arm nor the change itself may drift."""
    row = _decided(plan, times, 1, arms)
    is_stable = row.is_stable and row.effect is not None and verdicts.is_stable(row.effect, arms)
    return replace(row, verdict=ChangeVerdict.SAME_CODE, is_stable=is_stable)


def _finished(plan: Plan, ended: Sequence[ComparedRow], stages: Sequence[Sequence[RowTimes]]) -> Comparison:
    """Return the comparison with its rows in order, and the change over all rows."""
    rows = tuple(sorted(ended, key=lambda row: (row.kernel, list(row.shape.items()), repr(row.problem))))
    origin = f"Timed in turns, --configs {plan.options.configs}"
    comparison = Comparison(plan.sides.before, plan.sides.after, rows, origin=origin)
    timed = ([times for times in stage if not times.failure] for stage in stages)
    whole = [stage for stage in timed if stage]
    if not whole:
        return comparison
    changes = [[times.changes for times in stage] for stage in whole]
    controls = [[times.controls for times in stage] for stage in whole]
    return replace(comparison, overall=verdicts.all_rows(changes, controls), control=verdicts.geomean(controls))
