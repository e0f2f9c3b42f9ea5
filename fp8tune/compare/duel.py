"""The rounds of a comparison: three fresh workers, one on either side and a control, time every row in mirrored order.

The control has the first side's code once more: what it shows is what this machine makes of no change at all. The
three take turns on one GPU, forth and back (A B C, C B A), so that a drift hits all alike. From round to round and row
to row they take another order: in six rounds each is first, second and last equally often, so that what a place does to
a block (the first follows an allocation, the last comes twice in a row) is no difference between the sides. A round
gives each row one log ratio.

A launch may break the GPU context of its process. Then that row ends with the reason, and the process with it: the rows
after it are timed by a fresh one, and the other two go on.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec

from fp8tune.compare import side
from fp8tune.compare.side import Side
from fp8tune.measure import device
from fp8tune.measure import trial as measure
from fp8tune.measure.clock import Slot
from fp8tune.measure.laboratory import Laboratory, answer_to
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied
from fp8tune.records import NamedInts, Outcome, Problem, Progress, Status

P = ParamSpec("P")

ARMS = ("before", "after", "control")
BEFORE, AFTER, CONTROL = range(len(ARMS))
ORDERS = tuple(itertools.permutations((BEFORE, AFTER, CONTROL)))
BLOCKS = 2
"""Blocks of an arm in a round: one on the way forth, one on the way back."""
TIMEOUT_S = 120.0
MOST_ROUNDS = 1000
"""No comparison has as many: a worker that replaces another is numbered from there on."""


@dataclass(frozen=True)
class Arm:
    """One row on one side: how a worker loads the spec, and what it launches."""

    reference: str
    config: NamedInts


@dataclass(frozen=True)
class Contest:
    """One row of the comparison that is to be timed."""

    problem: Problem
    before: Arm
    after: Arm


@dataclass
class Score:
    """What the rounds of one row gave: a list entry a round. Nothing more is timed once there is a ``failure``."""

    changes: list[float] = field(default_factory=list)
    """Log of after over before."""
    controls: list[float] = field(default_factory=list)
    """Log of control over before."""
    before_us: list[float] = field(default_factory=list)
    after_us: list[float] = field(default_factory=list)
    failure: str = ""
    blocks: int = 0
    stalled: int = 0
    """Blocks timed again, because the machine was held up: see :mod:`fp8tune.measure.steady`."""
    throttled: int = 0
    """Blocks at whose begin or end the device ran slower than it should."""
    slowdowns: set[str] = field(default_factory=set)
    """Why it did."""

    def add(self, rounds: Sequence[Sequence[Outcome]], arch: str) -> None:
        """Take a round: the timed blocks of each arm."""
        logs = [math.fsum(math.log(_time_us(block)) for block in arm) / len(arm) for arm in rounds]
        self.changes.append(logs[AFTER] - logs[BEFORE])
        self.controls.append(logs[CONTROL] - logs[BEFORE])
        self.before_us.append(math.exp(logs[BEFORE]))
        self.after_us.append(math.exp(logs[AFTER]))
        for block in itertools.chain.from_iterable(rounds):
            slowdowns = device.slowdowns(arch, block.telemetry)
            self.blocks += 1
            self.stalled += bool(block.reason)  # a block that is ok has a reason where others were thrown away
            self.throttled += bool(slowdowns)
            self.slowdowns.update(slowdowns)


def _time_us(block: Outcome) -> float:
    assert block.time_us is not None  # only the interpreter's timer times nothing, and is not asked
    return block.time_us


class Played(Progress):
    """One row of one round is timed."""


def play(
    contests: Sequence[Contest],
    scores: Sequence[Score],
    sides: tuple[Side, Side],
    laboratory: Laboratory,
    rounds: range,
) -> Iterator[Played]:
    """Play every contest once in each of ``rounds``, adding to its score. Closing the generator ends the workers."""
    begun = time.monotonic()
    total = len(contests) * len(rounds)
    for number in rounds:
        with _Trio(sides, laboratory, number) as trio:
            for index, (contest, score) in enumerate(zip(contests, scores, strict=True)):
                if not score.failure:
                    trio.time(index, contest, score)
                done = (number - rounds.start) * len(contests) + index + 1
                yield Played(done, total, time.monotonic() - begun)


class _Trio:
    """The three workers of one round."""

    def __init__(self, sides: tuple[Side, Side], laboratory: Laboratory, number: int) -> None:
        before, after = sides
        self._sides = (before, after, before)
        self._workers = (Worker(), Worker(), Worker())
        self._replaced = [0, 0, 0]
        self._threads = ThreadPoolExecutor(len(self._workers))
        self._laboratory = laboratory
        self._number = number

    def __enter__(self) -> _Trio:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def time(self, index: int, contest: Contest, score: Score) -> None:
        """One contest, forth and back. What fails here passed before: the row's score keeps the reason."""
        arms = (contest.before, contest.after, contest.before)
        order = ORDERS[(self._number + index) % len(ORDERS)]
        blocks: tuple[list[Outcome], ...] = ([], [], [])
        # all three answers are waited for: who is still at this row cannot be asked for the next
        ready = list(self._threads.map(lambda arm: self._launch_once(arm, arms[arm], contest.problem), order))
        score.failure = "; ".join(
            _said(arm, outcome) for arm, outcome in zip(order, ready, strict=True) if _failed(outcome)
        )
        for turn, arm in enumerate((*order, *reversed(order))):
            if score.failure:
                return
            position = index * BLOCKS * len(order) + turn
            outcome = self._block(arm, arms[arm], contest.problem, position)
            score.failure = _said(arm, outcome) if _failed(outcome) else ""
            blocks[arm].append(outcome)
        if not score.failure:
            score.add(blocks, self._laboratory.device.arch)

    def _launch_once(self, arm: int, how: Arm, problem: Problem) -> Outcome:
        timer, torch_device = self._laboratory.timer, self._laboratory.torch_device
        return self._call(arm, measure.launch_once, how.reference, problem, how.config, timer, torch_device)

    def _block(self, arm: int, how: Arm, problem: Problem, position: int) -> Outcome:
        timer, torch_device = self._laboratory.timer, self._laboratory.torch_device
        process = (self._replaced[arm] * MOST_ROUNDS + self._number) * len(self._workers) + arm
        slot = Slot(process, self._number, position, clock=self._number)
        return self._call(arm, measure.run_final, how.reference, problem, how.config, timer, torch_device, slot)

    def _call(self, arm: int, function: Callable[P, Outcome], /, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        """A worker's answer. One that crashed or hung has ended: the next call begins a fresh one."""
        try:
            outcome = self._workers[arm].call(TIMEOUT_S, side.within, self._sides[arm], function, *args, **kwargs)
        except (WorkerDied, RemoteError) as error:
            outcome = answer_to(error)
        if outcome.status in (Status.CRASHED, Status.TIMEOUT):
            self._workers[arm].kill()
            self._replaced[arm] += 1
        return outcome


def _failed(outcome: Outcome) -> bool:
    return outcome.status is not Status.OK


def _said(arm: int, outcome: Outcome) -> str:
    return f"{ARMS[arm]}: {outcome.status}: {outcome.reason}"
