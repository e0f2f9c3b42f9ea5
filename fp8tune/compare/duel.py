"""The rounds of a comparison: three fresh workers, one on either side and a control, time every row in mirrored order.

The control has the first side's code once more: what it shows is what this machine makes of no change at all. The
three take turns on one GPU, forth and back (A B C, C B A), so that a drift hits all alike; from round to round and row
to row another one begins, so A and B meet in ABBA and in BAAB order. A round gives each row one log ratio.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from fp8tune.compare import side
from fp8tune.compare.side import Side, Turn
from fp8tune.measure.laboratory import Laboratory
from fp8tune.measure.worker import RemoteError, Worker, WorkerDied
from fp8tune.records import NamedInts, Pace, Problem

P = ParamSpec("P")
T = TypeVar("T")

BEFORE, AFTER, CONTROL = range(3)
ORDERS = tuple(itertools.permutations((BEFORE, AFTER, CONTROL)))
BLOCKS = 2
"""Blocks of an arm in a round: one on the way forth, one on the way back."""
TIMEOUT_S = 120.0


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

    def add(self, blocks_us: Sequence[Sequence[float]]) -> None:
        """Take a round: the blocks of each arm."""
        logs = [math.fsum(map(math.log, blocks)) / len(blocks) for blocks in blocks_us]
        self.changes.append(logs[AFTER] - logs[BEFORE])
        self.controls.append(logs[CONTROL] - logs[BEFORE])
        self.before_us.append(math.exp(logs[BEFORE]))
        self.after_us.append(math.exp(logs[AFTER]))


class Played(Pace):
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
        blocks_us: tuple[list[float], ...] = ([], [], [])
        try:
            list(self._threads.map(lambda arm: self._make_ready(arm, arms[arm], contest.problem), order))
            for turn, arm in enumerate((*order, *reversed(order))):
                position = index * BLOCKS * len(order) + turn
                blocks_us[arm].append(self._block(arm, arms[arm], contest.problem, position))
        except (WorkerDied, RemoteError) as error:
            score.failure = str(error).strip().splitlines()[-1][:300]
            return
        score.add(blocks_us)

    def _make_ready(self, arm: int, how: Arm, problem: Problem) -> None:
        timer, torch_device = self._laboratory.timer, self._laboratory.torch_device
        self._call(arm, side.make_ready, how.reference, problem, how.config, timer, torch_device)

    def _block(self, arm: int, how: Arm, problem: Problem, position: int) -> float:
        turn = Turn(self._number, self._number * len(self._workers) + arm, position)
        return self._call(arm, side.block, how.reference, problem, how.config, self._laboratory.timer, turn)

    def _call(self, arm: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._workers[arm].call(TIMEOUT_S, side.within, self._sides[arm], function, *args, **kwargs)
