"""Experiments: fresh worker processes time some arms in permuted rounds, and a failure ends only what it must.

A :class:`Group` holds the arms that are compared with each other, such as the finalists of a problem. A process times
each group once: a *turn* of several rounds, and a round has one block of every arm. The groups share the processes, so
that one process at a time is on the device. A process is one worker, or one for each *seat* if arms come from several
code trees and take turns.

Tensors are built and each arm is launched or checked before the first block, so that nothing compiles on the clock. A
worker that died, hung or broke its GPU context is replaced and numbered anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from fp8tune.measure.arms import Arm, Place
from fp8tune.measure.trees import Tree
from fp8tune.records import Outcome, Problem, Status

if TYPE_CHECKING:
    from fp8tune.measure.backends import ProcessBackend, ProcessWorker
    from fp8tune.measure.simulated import SimulatedBackend

A = TypeVar("A", bound=Arm)
S = TypeVar("S")

MOST_PROCESSES = 1000  # more than any schedule has: a worker that replaces another is numbered from there on


@dataclass(frozen=True)
class CompileProgress:
    """Configs compiled of those this problem needs."""

    problem: Problem
    done: int
    total: int


@dataclass(frozen=True)
class Ceiling:
    """Speed of a dense GEMM in flop/s, by input dtype; without a dtype, of a copy in GB/s read plus written."""

    in_dtype: str
    rate: float


Screened = Ceiling | CompileProgress | tuple[int, Outcome]
"""An event of a coarse pass: ceilings, progress of the compilers, and the number of an arm with its outcome."""


Backend: TypeAlias = "ProcessBackend | SimulatedBackend"
"""A GPU, Triton's interpreter, the compiler alone, or a simulated GPU, on which arms run."""

Worker: TypeAlias = "ProcessWorker | SimulatedBackend"
"""One worker process, or a stand-in. A failure is an Outcome; the next call starts a new process."""


@dataclass
class Group(Generic[A, S]):
    """Arms that are timed together, for a subject of the caller."""

    subject: S
    arms: list[A]  # those still timed
    processes: set[int] = field(default_factory=set)  # processes that have timed all of them
    failure: str = ""  # why nothing more of the group is timed

    def wants(self, process: int) -> bool:
        """Return True if the process has yet to time the group."""
        return bool(self.arms) and not self.failure and process not in self.processes


@dataclass(frozen=True)
class TimedBlock(Generic[A]):
    """One arm's block."""

    arm: A
    place: Place
    outcome: Outcome


@dataclass(frozen=True)
class Turn(Generic[A, S]):
    """One process at one group."""

    group: Group[A, S]
    process: int
    blocks: tuple[TimedBlock[A], ...] = ()  # of all rounds; none if an arm failed: rounds count only with all arms
    failed: tuple[TimedBlock[A], ...] = ()  # arms that have left the group, or that have ended it


@dataclass(frozen=True)
class Schedule(Generic[A, S]):
    """Processes, rounds and rules of an experiment."""

    processes: range  # numbers, each fresh and with all groups: from 1 if a worker of number 0 was there before
    rounds: int
    order: Callable[[Group[A, S], int, int], Sequence[A]] = lambda group, process, round: group.arms
    """(group, process, round) -> the arms in the order of their blocks; an arm may come twice."""
    trees: tuple[Tree | None, ...] = (None,)  # the code tree of each seat
    on_failure: Literal["drop", "end"] = "drop"
    """Drop an arm that fails, and let the process begin its turn anew without it; or end the group's experiment. If its
    tensors cannot be built, the group ends in any case."""
    is_checked: bool = False  # whether bytes are compared before the first block of a process and after each block
    is_first_checked: bool = False  # whether bytes are compared before the first block of the first process
    is_over: Callable[[], bool] = lambda: False  # called before each turn: the experiment ends once it returns True


def measure(
    backend: Backend, groups: Sequence[Group[A, S]], schedule: Schedule[A, S], worker: Worker | None = None
) -> Iterator[Turn[A, S]]:
    """Time each group once in each process, less what a group has already. Closing the generator ends the workers.

    The order of turns is that of processes, then that of groups. ``worker``: an existing one that outlives this
    experiment, instead of fresh ones. Raises MachineError if clocks or power limits change in between.
    """
    for process in schedule.processes:
        pending = [(index, group) for index, group in enumerate(groups) if group.wants(process)]
        if not pending:
            continue
        workers = [worker] if worker else [backend.worker(tree) for tree in schedule.trees]
        team = _Team(workers, schedule, process)
        try:
            for index, group in pending:
                while group.wants(process):
                    if schedule.is_over():
                        return
                    yield team.turn(group, index)
        finally:
            if team.threads is not None:
                team.threads.shutdown(wait=False, cancel_futures=True)
            for one_time_worker in [] if worker else workers:
                one_time_worker.close()


class _Team(Generic[A, S]):
    """The workers of one process number, one for each seat."""

    def __init__(self, workers: Sequence[Worker], schedule: Schedule[A, S], process: int) -> None:
        self.workers, self.schedule, self.process = workers, schedule, process
        self.replaced = [0] * len(workers)
        self.threads = ThreadPoolExecutor(len(workers)) if len(workers) > 1 else None

    def turn(self, group: Group[A, S], index: int) -> Turn[A, S]:
        schedule, blocks = self.schedule, list[TimedBlock[A]]()
        is_checked = schedule.is_checked
        is_checked_first = is_checked or (schedule.is_first_checked and self.process == schedule.processes[0])
        first_of_seats = list({arm.seat: arm for arm in reversed(group.arms)}.values())
        if failed := self._failed(first_of_seats, "build"):
            return self._failure(group, failed, ends=True)
        if failed := self._failed(group.arms, "check" if is_checked_first else "launch"):
            return self._failure(group, failed)
        for round in range(self.schedule.rounds):
            after, order = "", self.schedule.order(group, self.process, round)
            start = index * len(order) if self.threads else 0  # seats that share a clock continue where others stopped
            for position, arm in enumerate(order, start):
                place, worker = self._place(arm, round, position, after), self.workers[arm.seat]
                ask: Callable[[Any, Place], Outcome] = worker.checked_block if is_checked else worker.block
                blocks.append(TimedBlock(arm, place, self._counted(arm, ask(arm, place))))
                if blocks[-1].outcome.status is not Status.OK:
                    return self._failure(group, blocks[-1:])
                after = arm.work.identity
        group.processes.add(self.process)
        return Turn(group, self.process, tuple(blocks))

    def _failure(self, group: Group[A, S], failed: Sequence[TimedBlock[A]], ends: bool = False) -> Turn[A, S]:
        if ends or self.schedule.on_failure == "end":
            group.failure = failed[0].outcome.reason or str(failed[0].outcome.status)
        else:
            gone = {replace(block.arm, duplicate=False) for block in failed}
            group.arms = [arm for arm in group.arms if replace(arm, duplicate=False) not in gone]
        return Turn(group, self.process, failed=tuple(failed))

    def _failed(self, arms: Sequence[A], step: Literal["build", "check", "launch"]) -> list[TimedBlock[A]]:
        """Return the arms that fail a step, in their order. Seats work beside each other; all of them finish."""

        def failed(seat: int) -> list[TimedBlock[A]]:
            ask: Callable[[Any], Outcome] = getattr(self.workers[seat], step)
            outcomes = [(arm, self._counted(arm, ask(arm))) for arm in arms if arm.seat == seat]
            bad = [(arm, outcome) for arm, outcome in outcomes if outcome.status is not Status.OK]
            return [TimedBlock(arm, self._place(arm, 0, 0, ""), outcome) for arm, outcome in bad]

        blocks = chain.from_iterable((self.threads.map if self.threads else map)(failed, range(len(self.workers))))
        return sorted(blocks, key=lambda block: arms.index(block.arm))

    def _counted(self, arm: A, outcome: Outcome) -> Outcome:
        """Count a worker that crashed or hung: the next call is another process's."""
        self.replaced[arm.seat] += outcome.status in (Status.CRASHED, Status.TIMEOUT)
        return outcome

    def _place(self, arm: A, round: int, position: int, after: str) -> Place:
        seats = len(self.workers)
        process = (self.replaced[arm.seat] * MOST_PROCESSES + self.process) * seats + arm.seat
        return Place(process, round, position, after, arm.duplicate, self.process if seats > 1 else None)
