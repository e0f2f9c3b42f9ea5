"""Rounds of a comparison: in each, three fresh workers time every row, before, after and as an A/A control.

The control runs the first side's code once more, and shows what this machine makes of no change at all. The three take
turns on one GPU, forth and back (A B C, C B A), so that drift affects all alike. Their order changes from round to
round and row to row: in six rounds each is first, second and last equally often, so that no position favours a side.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from fp8tune.comparing import verdicts
from fp8tune.comparing.verdicts import ChangeVerdict, ComparedRow
from fp8tune.measure import device
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.engine import Backend, Group, Schedule, Turn, measure
from fp8tune.measure.timing import UNGATED
from fp8tune.measure.trees import Tree
from fp8tune.records import Device, Problem
from fp8tune.stats.means import geomean

SEATS = ("before", "after", "control")
BEFORE, AFTER, CONTROL = range(len(SEATS))
ORDERS = tuple(itertools.permutations((BEFORE, AFTER, CONTROL)))

Report = Callable[[str, int, int], None]  # shows a step, the number of parts done and of all parts; 0 without parts


@dataclass(eq=False)
class Row:
    """One problem of one kernel with the launch of each side, its times and its verdict."""

    before: KernelArm
    after: KernelArm
    verdict: ChangeVerdict | None = None  # None until it is known; OPEN after a failure, and nothing more is timed
    reason: str = ""
    logs: list[list[float]] = field(default_factory=list)  # mean log time of each seat, one list per round
    blocks: int = 0
    disturbances: Counter[str] = field(default_factory=Counter)  # number of disturbed blocks by reason

    @property
    def arms(self) -> tuple[KernelArm, KernelArm]:
        """Launches of both sides."""
        return self.before, self.after

    @property
    def problem(self) -> Problem:
        """Problem of both sides."""
        return self.before.problem

    def changes(self, seat: int = AFTER) -> list[float]:
        """Return the log ratio of a seat over before in each round."""
        return [logs[seat] - logs[BEFORE] for logs in self.logs]

    def end(self, verdict: ChangeVerdict, reason: str = "") -> None:
        """Give the row its verdict."""
        self.verdict, self.reason = verdict, reason

    def add(self, turn: Turn[KernelArm, Row], arch: str) -> None:
        """Add a round: the blocks of all arms, or their failures."""
        if turn.failed:
            outcomes = [(SEATS[block.arm.seat], block.outcome) for block in turn.failed]
            reasons = [f"{seat}: {outcome.status}: {outcome.reason}" for seat, outcome in outcomes]
            self.end(ChangeVerdict.OPEN, "; ".join(filter(None, [self.reason, *reasons])))
        if not turn.blocks:
            return
        times: list[list[float]] = [[] for _ in SEATS]
        for block in turn.blocks:
            assert block.outcome.time_us is not None
            times[block.arm.seat].append(math.log(block.outcome.time_us))
            for name in device.slowdowns(arch, block.outcome.telemetry):
                self.disturbances[f"the GPU was slowed down ({name})"] += 1
            if block.outcome.reason == UNGATED:
                self.disturbances["the launch waits for the GPU, so the host's time is included"] += 1
        self.blocks += len(turn.blocks)
        self.logs.append([fmean(logs) for logs in times])

    def result(self, device: Device, tested: int, controls: int) -> ComparedRow:
        """Return the row with its verdict. ``tested``: rows decided together; ``controls``: rows with a control."""
        assert self.verdict is not None or self.logs
        verdict, configs = self.verdict or ChangeVerdict.OPEN, (self.before.config, self.after.config)
        row = ComparedRow(self.problem.kernel, verdict, self.problem, device, None, None, self.reason, *configs)
        if self.verdict is not None:
            return row
        effect, control = verdicts.paired(self.changes()), verdicts.paired(self.changes(CONTROL))
        return replace(
            row,
            verdict=verdicts.decide(effect, tested),
            before_us=geomean(math.exp(logs[BEFORE]) for logs in self.logs),
            after_us=geomean(math.exp(logs[AFTER]) for logs in self.logs),
            effect=effect,
            control=control,
            is_stable=verdicts.is_stable(control, controls),
            tested=tested,
            n=len(self.logs),
            disturbances=tuple(
                f"{count} of {self.blocks} blocks: {reason}" for reason, count in sorted(self.disturbances.items())
            ),
        )


def time_rounds(backend: Backend, trees: tuple[Tree, Tree], rows: Sequence[Row], rounds: range, report: Report) -> None:
    """Time every row once in each round, on the same numbers of workers whenever it is repeated."""
    numbers = {row: number for number, row in enumerate(rows)}

    def order(group: Group[KernelArm, Row], process: int, _round: int) -> list[KernelArm]:
        seats = ORDERS[(process + numbers[group.subject]) % len(ORDERS)]
        return [group.arms[seat] for seat in (*seats, *reversed(seats))]

    groups = [Group(row, [replace(arm, seat=seat) for seat, arm in enumerate((*row.arms, row.before))]) for row in rows]
    for turn in measure(backend, groups, Schedule(rounds, 1, order, trees=(*trees, trees[0]), on_failure="end")):
        turn.group.subject.add(turn, backend.device.arch)
        done = (turn.process - rounds.start) * len(rows) + numbers[turn.group.subject] + 1
        report("timing", done, len(rows) * len(rounds))
