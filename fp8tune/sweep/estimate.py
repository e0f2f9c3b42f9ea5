"""How long a sweep still takes: from its events and the times at which they came. Pure: no clock, no database.

What is left is counted by kinds of work (:class:`Work`), and each kind has a pace, which is what it took so far. A kind
that has not begun is taken for the one most like it. Repeats and finals are expected before they are known: how many
configs are near the best, and how many processes a problem needs until it is settled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from fp8tune.records import Problem, Row, Status
from fp8tune.sweep.events import Ahead, Event, FinalsAhead, Finished, NoFinals, RoundStarted, Started, TrialDone

NEAR_SHARE = 0.31
"""Of configs that later rounds repeat: the median of 131 problems swept on an H100 and an H200."""

BLOCK_S = 0.02
"""Of a config that is compiled and checked: the median of 24 sweeps on an H100 and an H200."""

OPEN_SHARE = 0.09
"""Of problems that are open when they are judged the first time: of 430 on H100 and H200."""

STILL_OPEN_SHARE = 0.35
"""Of problems that are open at one judgement, those that are at the next."""

PROBLEMS_BEFORE = 4.0
"""As many problems as these shares count for, beside those of this sweep."""


@dataclass(frozen=True)
class Work:
    """What is left to do, or what something takes in seconds, by kind."""

    problems: float = 0.0
    """To begin: tensors, reference, the first config."""
    trials: float = 0.0
    """Of first rounds, less the first of each problem."""
    repeats: float = 0.0
    """Trials of later rounds."""
    processes: float = 0.0
    """Of the finals, to begin: each with its first problem."""
    turns: float = 0.0
    """Blocks of the finals, less those of each process' first problem."""

    def seconds(self, pace: Work) -> float:
        """``pace``: seconds for one of each kind. More of anything never takes less."""
        return math.fsum(amount(self) * amount(pace) for amount in _KINDS)


_KINDS = [attrgetter(name) for name in Work.__dataclass_fields__]


@dataclass
class _Measured:
    """What one kind of work took."""

    count: float = 0.0
    seconds: float = 0.0

    def pace(self, otherwise: float, weight: float = 0.0) -> float:
        """Seconds for one; ``otherwise`` counts as much as ``weight`` of them."""
        count = self.count + weight
        return (self.seconds + weight * otherwise) / count if count else otherwise


@dataclass
class _Final:
    """One problem's finals."""

    arms: int
    likely: int | None
    done: int
    blocks_done: int = 0
    """Since ``done`` was told."""


@dataclass
class Estimate:
    """Takes a sweep's events in their order. Times are seconds of any clock."""

    ahead: Ahead = field(default_factory=Ahead)
    _begun_s: float | None = None
    _last_s: float = 0.0
    _deadline_s: float = math.inf
    _problem: Problem | None = None
    """The one that is screened."""
    _is_begun: bool = False
    """Whether that one has had its first trial."""
    _todo: dict[Problem, int] = field(default_factory=dict)
    """Trials that first rounds still have."""
    _configs: dict[Problem, int] = field(default_factory=dict)
    """Of problems with a first round to run: how many are tried."""
    _repeated: dict[Problem, int] = field(default_factory=dict)
    """Trials of the first of the later rounds."""
    _repeats: int = 0
    """Trials that the rounds which have begun still have, but for the first ones."""
    _rounds_left: dict[Problem, int] = field(default_factory=dict)
    """Later rounds that have not begun."""
    _finals: dict[Problem, _Final] = field(default_factory=dict)
    _turn: tuple[str, Problem | None] = ("", None)
    """The process of the finals that is on the device, and the problem that it timed last."""
    _first_turn: tuple[str, Problem | None] = ("", None)
    """That process, and its first problem."""
    _begun_processes: int = 0
    _measured: dict[str, _Measured] = field(
        default_factory=lambda: {name: _Measured() for name in Work.__dataclass_fields__}
    )
    _is_finished: bool = False

    def take(self, event: Event, now_s: float) -> None:
        """An event of :func:`fp8tune.sweep.loop.sweep`, and when it came."""
        match event:
            case Started(ahead=ahead):
                self._start(ahead, now_s)
            case RoundStarted():
                self._begin_round(event)
            case FinalsAhead(problem, arms, done, likely):
                self._finals[problem] = _Final(arms, likely, done)
            case NoFinals(problem):
                self._finals[problem] = _Final(0, None, 0)
            case TrialDone(row, from_database):
                if not from_database and row.outcome.status is not Status.PRUNED:
                    self._trial(row, now_s)
            case Finished():
                self._is_finished = True

    def _start(self, ahead: Ahead, now_s: float) -> None:
        self.ahead, self._is_finished = ahead, False
        self._begun_s = self._last_s = now_s
        if ahead.budget_s is not None:
            self._deadline_s = now_s + ahead.budget_s
        self._todo |= ahead.trials
        self._configs |= ahead.trials
        self._rounds_left |= dict.fromkeys(ahead.trials, ahead.rounds - 1)

    def _begin_round(self, event: RoundStarted) -> None:
        if event.round == 0:
            self._problem, self._is_begun = event.problem, False
            self._todo[event.problem] = event.trials
            return
        self._repeated.setdefault(event.problem, event.trials)
        self._rounds_left[event.problem] = event.rounds - 1 - event.round
        self._repeats = event.trials

    def _trial(self, row: Row, now_s: float) -> None:
        problem, kind = row.problem, "trials"
        count = 1.0
        if row.stage != "screen":
            kind, count = self._turn_of(row)
        elif row.round:
            self._repeats, kind = max(0, self._repeats - 1), "repeats"
        else:
            self._todo[problem] = max(0, self._todo.get(problem, 1) - 1)
            if not self._is_begun:
                self._is_begun, kind = True, "problems"
        measured = self._measured[kind]
        measured.count += count
        measured.seconds += now_s - self._last_s
        self._last_s = now_s

    def _turn_of(self, row: Row) -> tuple[str, float]:
        """The kind of work that a block of the finals is, and how much: the first of a turn, which come at once, counts
        for all of them."""
        process, turn = self._turn[0], (row.process, row.problem)
        is_new, self._turn = turn != self._turn, turn
        if row.process != process:
            self._first_turn = turn
            self._begun_processes += 1
        final = self._finals.setdefault(row.problem, _Final(round(self._arms()), None, 0))
        blocks = final.arms * self.ahead.blocks * is_new
        final.blocks_done += blocks
        return ("processes", float(is_new)) if turn == self._first_turn else ("turns", float(blocks))

    # What is left

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the end, of which the time budget is one; None before anything was timed. Zero at the end."""
        if self._is_finished:
            return 0.0
        if self._begun_s is None or not any(measured.count for measured in self._measured.values()):
            return None if self._deadline_s == math.inf else max(0.0, self._deadline_s - now_s)
        return self._until(now_s, self.likely())

    def most_s(self, now_s: float) -> float | None:
        """The same if every problem stays open until its last process."""
        if self.left_s(now_s) is None:
            return None
        return 0.0 if self._is_finished else self._until(now_s, self.most())

    def _until(self, now_s: float, work: Work) -> float:
        """What goes on is done in part: as much of the pace of one trial or turn has gone by, but not more."""
        pace = self.pace()
        going_on = max(pace.trials, pace.repeats) if any(self._todo.values()) else pace.repeats
        if self._turn[0]:
            going_on = pace.processes
        gone_s = min(max(0.0, now_s - self._last_s), going_on)
        return max(0.0, min(work.seconds(pace) - gone_s, self._deadline_s - now_s))

    def pace(self) -> Work:
        """Seconds for one of each kind."""
        of = self._measured
        trials = of["trials"].pace(of["problems"].pace(0.0))
        problems = of["problems"].pace(trials)
        repeats = of["repeats"].pace(min(trials, BLOCK_S), weight=5)
        turns = of["turns"].pace(repeats, weight=5)
        in_turn = self._arms() * self.ahead.blocks
        processes = of["processes"].pace(self.ahead.fresh_s + in_turn * turns, weight=0.5)
        return Work(problems, trials, repeats, processes, turns)

    def likely(self) -> Work:
        """What is left, as far as anybody can tell."""
        return self._left([self._processes(final) for final in self._finals.values()], self._expected())

    def most(self) -> Work:
        """What is left if every problem stays open until its last process."""
        last = float(max(self.ahead.judged_after, default=0))
        return self._left([last for _ in self._finals], (last, last))

    def _left(self, processes: Sequence[float], unknown: tuple[float, float]) -> Work:
        """``processes``: in all, of each problem whose finals are known; ``unknown``: of each other and of the last."""
        todo = {problem: count for problem, count in self._todo.items() if count}
        begun = self._problem in todo and self._is_begun
        near = self._near_share()
        repeats = self._repeats + sum(
            rounds * self._repeated.get(problem, near * self._configs.get(problem, 0))
            for problem, rounds in self._rounds_left.items()
        )
        blocks = self.ahead.blocks
        left, last = [], 0.0
        for final, count in zip(self._finals.values(), processes, strict=True):
            left.append(max(0.0, final.arms * blocks * (count - final.done) - final.blocks_done))
            last = max(last, count if left[-1] else 0.0)
        others = sum(problem not in self._finals for problem in self._rounds_left) if self.ahead.judged_after else 0
        left.append(others * self._arms() * blocks * unknown[0])
        if others:
            last = max(last, unknown[1])
        in_turn = self._arms() * blocks
        openings = min(max(0.0, last - self._begun_processes), sum(left) / in_turn if in_turn else 0.0)
        return Work(
            problems=len(todo) - begun,
            trials=sum(todo.values()) - (len(todo) - begun),
            repeats=repeats,
            processes=openings,
            turns=max(0.0, sum(left) - openings * in_turn),
        )

    def _near_share(self) -> float:
        """Of a problem's configs those that later rounds repeat."""
        configs = [self._configs.get(problem, 0) for problem in self._repeated]
        weight = sum(configs) / len(configs) if configs else 1.0
        return (sum(self._repeated.values()) + weight * NEAR_SHARE) / (sum(configs) + weight)

    def _arms(self) -> float:
        """Of a problem in the finals."""
        known = [final.arms for final in self._finals.values() if final.arms]
        fewest = min(self._configs.values(), default=self.ahead.finalists)
        expected = min(self.ahead.finalists, fewest) + 1
        return (sum(known) + expected) / (len(known) + 1)

    def _processes(self, final: _Final) -> float:
        """In all, of one problem."""
        if final.likely is not None or not self.ahead.judged_after:
            return float(final.likely or 0)
        return self._expected(after=final.done)[0]

    def _expected(self, after: int = 0) -> tuple[float, float]:
        """Processes that a problem of which nothing is known takes, and those that the last of all such takes."""
        known = sum(final.likely is not None for final in self._finals.values())
        others = math.sqrt(max(1, len(self._rounds_left) - known))  # problems of a kernel are often open together
        mine = last = float(after)
        is_open, shares = 1.0, self._open_shares()
        for number, share in zip(self.ahead.judged_after, shares, strict=True):
            more = max(0, number - max(after, self._judgement_before(number)))
            mine += is_open * more
            last += more if 1 - (1 - is_open) ** others >= 0.5 else 0.0
            is_open *= share
        return mine, last

    def _judgement_before(self, number: int) -> int:
        return max((earlier for earlier in self.ahead.judged_after if earlier < number), default=0)

    def _open_shares(self) -> list[float]:
        """For each judgement, the share of problems that are still open after it."""
        likely = [final.likely for final in self._finals.values() if final.likely]
        shares = []
        for place, number in enumerate(self.ahead.judged_after):
            reached = [each for each in likely if each >= number]
            open_before = PROBLEMS_BEFORE * (STILL_OPEN_SHARE if place else OPEN_SHARE)
            is_open = sum(each > number for each in reached)
            shares.append((is_open + open_before) / (len(reached) + PROBLEMS_BEFORE))
        return shares
