"""The rounds of a comparison: in each, three fresh workers time every row: before, after, and a control.

The control has the first side's code once more: it shows what this machine makes of no change at all. The three take
turns on one GPU, forth and back (A B C, C B A), so that drift hits all alike. Their order changes from round to round
and row to row: in six rounds each is first, second and last equally often. So what a place does to a block (the first
follows an allocation, the last comes twice in a row) is no difference between the sides.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from fp8tune.comparing.rows import Row, Step
from fp8tune.measure import device
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.engine import Backend, Group, Schedule, Turn, measure
from fp8tune.measure.timing import UNGATED
from fp8tune.measure.trees import Tree
from fp8tune.stats.means import geomean

SEATS = ("before", "after", "control")
BEFORE, AFTER, CONTROL = range(len(SEATS))
ORDERS = tuple(itertools.permutations((BEFORE, AFTER, CONTROL)))
BLOCKS = 2
"""Blocks of an arm in a round: one on the way forth, one on the way back."""


@dataclass
class RowTimes:
    """Times of one row in all rounds. Nothing more is timed once there is a ``failure``.

    The counts are those of :class:`fp8tune.comparing.comparison.ComparedRow`.
    """

    row: Row
    number: int = 0
    """Position among the rows that are timed together."""
    logs: list[list[float]] = field(default_factory=list)
    """The mean log time of each arm, a list a round."""
    failure: str = ""
    blocks: int = 0
    ungated: int = 0
    throttled: int = 0
    slowdowns: set[str] = field(default_factory=set)

    @property
    def arms(self) -> list[KernelArm]:
        """Arms in the order of their seats."""
        return [replace(arm, seat=seat) for seat, arm in enumerate((*self.row, self.row.before))]

    @property
    def changes(self) -> list[float]:
        """Log ratio of after over before in each round."""
        return [logs[AFTER] - logs[BEFORE] for logs in self.logs]

    @property
    def controls(self) -> list[float]:
        """Log ratio of control over before in each round."""
        return [logs[CONTROL] - logs[BEFORE] for logs in self.logs]

    def time_us(self, arm: int) -> float:
        """Return the geometric mean of an arm's rounds."""
        return geomean(math.exp(logs[arm]) for logs in self.logs)

    def add(self, turn: Turn[KernelArm, RowTimes], arch: str) -> None:
        """Add a round: the blocks of all arms, or their failures."""
        for failed in turn.failed:
            message = f"{SEATS[failed.arm.seat]}: {failed.outcome.status}: {failed.outcome.reason}"
            self.failure = "; ".join(filter(None, [self.failure, message]))
        if not turn.blocks:
            return
        times: list[list[float]] = [[] for _ in SEATS]
        for block in turn.blocks:
            assert block.outcome.time_us is not None
            times[block.arm.seat].append(math.log(block.outcome.time_us))
            slowdowns = device.slowdowns(arch, block.outcome.telemetry)
            self.blocks += 1
            self.ungated += block.outcome.reason == UNGATED
            self.throttled += bool(slowdowns)
            self.slowdowns.update(slowdowns)
        self.logs.append([fmean(logs) for logs in times])


def time_rounds(
    backend: Backend, trees: tuple[Tree, Tree], rows: Sequence[Row], rounds: range
) -> Generator[Step, None, list[RowTimes]]:
    """Time every row once in each round. Closing the generator ends the workers."""
    times = [RowTimes(row, number) for number, row in enumerate(rows)]
    groups = [Group(row, row.arms) for row in times]
    schedule = Schedule(rounds, 1, _order, trees=(*trees, trees[0]), on_failure="end")
    begun, total = time.monotonic(), len(rows) * len(rounds)
    for turn in measure(backend, groups, schedule):
        turn.group.subject.add(turn, backend.device.arch)
        done = (turn.process - rounds.start) * len(rows) + turn.group.subject.number + 1
        yield Step("timing", done, total, (time.monotonic() - begun) / done * (total - done))
    return times


def _order(group: Group[KernelArm, RowTimes], process: int, round: int) -> list[KernelArm]:
    order = ORDERS[(process + group.subject.number) % len(ORDERS)]
    return [group.arms[seat] for seat in (*order, *reversed(order))]
