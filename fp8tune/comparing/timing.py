"""Rounds of a comparison: in each, three fresh workers time every row, before, after and as an A/A control.

The control runs the first side's code once more, and shows what this machine makes of no change at all. The three take
turns on one GPU, forth and back (A B C, C B A), so that drift hits all alike. Their order changes from round to round
and row to row: in six rounds each is first, second and last equally often, so that a position favours no side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from fp8tune.measure import device
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.engine import Backend, Group, Schedule, Turn, measure
from fp8tune.measure.timing import UNGATED
from fp8tune.measure.trees import Tree
from fp8tune.records import Problem
from fp8tune.stats.means import geomean

SEATS = ("before", "after", "control")
BEFORE, AFTER, CONTROL = range(len(SEATS))
ORDERS = tuple(itertools.permutations((BEFORE, AFTER, CONTROL)))


@dataclass(frozen=True)
class Step:
    """Progress of a comparison; ``total`` is 0 for a step without parts."""

    text: str
    done: int = 0
    total: int = 0


class Launches(NamedTuple):
    """One problem of one kernel, and the launch of each side."""

    before: KernelArm
    after: KernelArm

    @property
    def problem(self) -> Problem:
        """Problem of both sides."""
        return self.before.problem


@dataclass
class RowTimes:
    """Times of one row in all rounds. After a ``failure`` nothing more is timed."""

    launches: Launches
    number: int = 0
    """Position among the rows that are timed together."""
    logs: list[list[float]] = field(default_factory=list)
    """Mean log time of each arm, one list per round."""
    failure: str = ""
    blocks: int = 0
    disturbances: dict[str, int] = field(default_factory=dict)
    """Number of disturbed blocks by reason."""

    @property
    def arms(self) -> list[KernelArm]:
        """Arms in the order of their seats."""
        return [replace(arm, seat=seat) for seat, arm in enumerate((*self.launches, self.launches.before))]

    @property
    def changes(self) -> list[float]:
        """Log ratio of after over before in each round."""
        return [logs[AFTER] - logs[BEFORE] for logs in self.logs]

    @property
    def controls(self) -> list[float]:
        """Log ratio of control over before in each round."""
        return [logs[CONTROL] - logs[BEFORE] for logs in self.logs]

    def time_us(self, seat: int) -> float:
        """Return the geometric mean of an arm's rounds."""
        return geomean(math.exp(logs[seat]) for logs in self.logs)

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
            self.blocks += 1
            reasons = [f"the GPU was slowed down ({name})" for name in device.slowdowns(arch, block.outcome.telemetry)]
            if block.outcome.reason == UNGATED:
                reasons.append("the launch waits for the GPU, so the host's time is included")
            for reason in reasons:
                self.disturbances[reason] = self.disturbances.get(reason, 0) + 1
        self.logs.append([fmean(logs) for logs in times])


def time_rounds(
    backend: Backend, trees: tuple[Tree, Tree], rows: Sequence[Launches], rounds: range
) -> Generator[Step, None, list[RowTimes]]:
    """Time every row once in each round. Closing the generator ends the workers."""
    times = [RowTimes(row, number) for number, row in enumerate(rows)]
    groups = [Group(row, row.arms) for row in times]
    schedule = Schedule(rounds, 1, _order, trees=(*trees, trees[0]), on_failure="end")
    for turn in measure(backend, groups, schedule):
        turn.group.subject.add(turn, backend.device.arch)
        done = (turn.process - rounds.start) * len(rows) + turn.group.subject.number + 1
        yield Step("timing", done, len(rows) * len(rounds))
    return times


def _order(group: Group[KernelArm, RowTimes], process: int, round: int) -> list[KernelArm]:
    order = ORDERS[(process + group.subject.number) % len(ORDERS)]
    return [group.arms[seat] for seat in (*order, *reversed(order))]
