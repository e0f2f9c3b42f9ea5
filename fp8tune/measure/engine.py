"""The one experiment: fresh worker processes time some arms in permuted rounds, and a failure ends what it must.

A :class:`Group` holds the arms that are compared with each other, such as the finalists of a problem. A process times
each group once: a *turn*. A turn has rounds; a round times every arm, one block each. The groups share the processes,
so that one process at a time is on the device. A process is one worker, or one for each *seat* where arms come from
several code trees and take turns.

What every experiment needs is here: tensors are built and each arm is launched once before the first block, so that
nothing compiles on the clock; a worker that died, hung or broke its GPU context is replaced and numbered anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

from fp8tune.measure.arms import Arm, KernelArm, Place
from fp8tune.measure.trees import Tree
from fp8tune.records import Device, Kind, Outcome, Problem, Status

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=Arm)
S = TypeVar("S")

MOST_PROCESSES = 1000
"""No schedule has as many: a worker that replaces another is numbered from there on."""


def never() -> bool:
    """No time budget."""
    return False


class Worker(Protocol):
    """One worker process, or what stands for it. A failure is an Outcome; the next call starts a new process."""

    def build(self, arm: Arm) -> Outcome:
        """Build the tensors that the arm's group shares."""
        ...

    def launch(self, arm: Arm) -> Outcome:
        """Launch the arm once and wait: what compiles or breaks does so now."""
        ...

    def check(self, arm: KernelArm, *, with_edges: bool = True) -> Outcome:
        """Compare every byte with the reference, on the problem and, where wanted, on its edges. Times nothing."""
        ...

    def block(self, arm: Arm, place: Place) -> Outcome:
        """Time the arm."""
        ...

    def checked_block(self, arm: KernelArm, place: Place) -> Outcome:
        """Check the arm (once a process), time it, and check its output once more."""
        ...

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Run any function where kernels run; None where none do. Raises WorkerDied or RemoteError."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


@dataclass(frozen=True)
class CompileProgress:
    """Configs compiled of those this problem needs."""

    problem: Problem
    done: int
    total: int


@dataclass(frozen=True)
class CopyCeiling:
    """What a copy reaches on the device, in GB/s read plus written."""

    gb_per_s: float


@dataclass(frozen=True)
class ComputeCeiling:
    """What a dense GEMM of an input dtype reaches on the device."""

    in_dtype: str
    flop_per_s: float


Screened = CopyCeiling | ComputeCeiling | CompileProgress | tuple[int, Outcome]
"""What a screen gives: ceilings, how far the compilers are, and the number of an arm with its outcome."""


class Backend(Protocol):
    """Where arms run: a GPU, Triton's interpreter, the compiler alone, or a simulated GPU."""

    kind: Kind
    device: Device
    timer: str
    """The clock's name, as stored with a sweep."""
    times: bool
    """False where arms are checked or compiled only, and so once is enough."""

    def worker(self, tree: Tree | None = None) -> Worker:
        """A fresh worker with the kernels of a code tree; None: the installed ones."""
        ...

    def compile(self, arms: Sequence[KernelArm], *, with_edges: bool = True) -> None:
        """Queue arms for the compilers, each once, in this order. They go on compiling beside whatever is next.

        ``with_edges``: also what a check launches on the edges.
        """
        ...

    def finish_compiling(self) -> None:
        """Wait for what is queued, and end the compilers: nothing runs beside what follows."""
        ...

    def screen(
        self, arms: Sequence[KernelArm], places: Sequence[Place], is_over: Callable[[], bool] = never
    ) -> Iterator[Screened]:
        """Check and time each arm of one problem; the number of an arm comes with its outcome, in any order.

        What is compiled is timed while the rest still compiles. ``is_over`` is asked while it waits: once it is True,
        nothing more is given.
        """
        ...

    def copy_gb_per_s(self) -> float | None:
        """What a copy reaches on the device now, read plus written; None where nothing is timed.

        Raises MachineError where the device cannot even copy."""
        ...

    def close(self) -> None:
        """End all processes and drop what is queued. The next call starts them again."""
        ...


@dataclass
class Group(Generic[A, S]):
    """Arms that are timed together, and whose they are."""

    subject: S
    """For whoever made the group."""
    arms: list[A]
    """Those still timed."""
    processes: set[int] = field(default_factory=set)
    """Those that have timed all of them."""
    failure: str = ""
    """Why nothing more is timed of the group."""

    def wants(self, process: int) -> bool:
        """True if the process has yet to time the group."""
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
    blocks: tuple[TimedBlock[A], ...] = ()
    """Of all rounds, in their order; none if an arm failed: rounds count only with all arms in them."""
    failed: tuple[TimedBlock[A], ...] = ()
    """The arms that failed. They are out of the group now, or the group has ended: see :class:`Schedule`."""


def in_order(group: Group[A, S], process: int, round: int) -> Sequence[A]:
    """The arms as they are."""
    return group.arms


@dataclass(frozen=True)
class Schedule(Generic[A, S]):
    """How an experiment goes."""

    processes: range
    """Numbers of the processes, each fresh and with all groups: from 1 where a worker of number 0 was there before."""
    rounds: int
    order: Callable[[Group[A, S], int, int], Sequence[A]] = in_order
    """(group, process, round) -> the arms in the order of their blocks; one may come twice."""
    trees: tuple[Tree | None, ...] = (None,)
    """The code tree of each seat."""
    on_failure: Literal["drop", "end"] = "drop"
    """An arm that fails is out, and the process begins its turn anew without it; or the group's experiment ends. If its
    tensors cannot be built, the group ends either way."""
    is_checked: bool = False
    """Whether bytes are compared before the first block of a process and after each block."""
    is_over: Callable[[], bool] = never
    """Asked before each turn: no other begins once it is True."""


def measure(
    backend: Backend, groups: Sequence[Group[A, S]], schedule: Schedule[A, S], worker: Worker | None = None
) -> Iterator[Turn[A, S]]:
    """Time each group once in each process, less what a group has already. Closing the generator ends the workers.

    The order of turns is that of processes, then that of groups. ``worker``: one that is there already and goes on
    after this, instead of a fresh one.
    """
    for process in schedule.processes:
        waiting = [(index, group) for index, group in enumerate(groups) if group.wants(process)]
        if not waiting:
            continue
        workers = [worker] if worker else [backend.worker(tree) for tree in schedule.trees]
        seats = _Seats(workers, schedule, process)
        try:
            for index, group in waiting:
                while group.wants(process):
                    if schedule.is_over():
                        return
                    yield seats.turn(group, index)
        finally:
            seats.close(*([] if worker else workers))


class _Seats(Generic[A, S]):
    """The workers of one process number."""

    def __init__(self, workers: Sequence[Worker], schedule: Schedule[A, S], process: int) -> None:
        self._workers, self._schedule, self._process = workers, schedule, process
        self._replaced = [0] * len(self._workers)
        self._threads = ThreadPoolExecutor(len(self._workers)) if len(self._workers) > 1 else None

    def close(self, *workers: Worker) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()

    def turn(self, group: Group[A, S], index: int) -> Turn[A, S]:
        firsts = list({arm.seat: arm for arm in reversed(group.arms)}.values())
        if unbuilt := self._failed(firsts, "build"):
            return self._ended(group, unbuilt)
        if failed := self._failed(group.arms, "check" if self._schedule.is_checked else "launch"):
            return self._without(group, failed)
        blocks: list[TimedBlock[A]] = []
        for round in range(self._schedule.rounds):
            after = ""
            order = self._schedule.order(group, self._process, round)
            first = index * len(order) if self._threads else 0  # whoever shares a clock goes on where others stopped
            for position, arm in enumerate(order, first):
                block = self._block(arm, round, position, after)
                if block.outcome.status is not Status.OK:
                    return self._without(group, [block])
                blocks.append(block)
                after = arm.work.identity
        group.processes.add(self._process)
        return Turn(group, self._process, tuple(blocks))

    def _without(self, group: Group[A, S], failed: Sequence[TimedBlock[A]]) -> Turn[A, S]:
        if self._schedule.on_failure == "end":
            return self._ended(group, failed)
        gone = {replace(block.arm, duplicate=False) for block in failed}
        group.arms = [arm for arm in group.arms if replace(arm, duplicate=False) not in gone]
        return Turn(group, self._process, failed=tuple(failed))

    def _ended(self, group: Group[A, S], failed: Sequence[TimedBlock[A]]) -> Turn[A, S]:
        group.failure = failed[0].outcome.reason or str(failed[0].outcome.status)
        return Turn(group, self._process, failed=tuple(failed))

    def _failed(self, arms: Sequence[A], step: Literal["build", "check", "launch"]) -> list[TimedBlock[A]]:
        """The arms that fail a step, in their order. Seats work beside each other, and all of them are waited for."""
        mine = [[arm for arm in arms if arm.seat == seat] for seat in range(len(self._workers))]

        def failed(seat: int) -> list[TimedBlock[A]]:
            ask: Callable[[Any], Outcome] = getattr(self._workers[seat], step)
            outcomes = [(arm, self._counted(seat, ask(arm))) for arm in mine[seat]]
            bad = [(arm, outcome) for arm, outcome in outcomes if outcome.status is not Status.OK]
            return [TimedBlock(arm, self._place(arm, 0, 0, ""), outcome) for arm, outcome in bad]

        found = list(chain.from_iterable((self._threads.map if self._threads else map)(failed, range(len(mine)))))
        return sorted(found, key=lambda block: arms.index(block.arm))

    def _block(self, arm: A, round: int, position: int, after: str) -> TimedBlock[A]:
        place = self._place(arm, round, position, after)
        worker = self._workers[arm.seat]
        ask: Callable[[Any, Place], Outcome] = worker.checked_block if self._schedule.is_checked else worker.block
        return TimedBlock(arm, place, self._counted(arm.seat, ask(arm, place)))

    def _counted(self, seat: int, outcome: Outcome) -> Outcome:
        """A worker that crashed or hung has ended: the next call is another process's."""
        self._replaced[seat] += outcome.status in (Status.CRASHED, Status.TIMEOUT)
        return outcome

    def _place(self, arm: A, round: int, position: int, after: str) -> Place:
        seats = len(self._workers)
        process = (self._replaced[arm.seat] * MOST_PROCESSES + self._process) * seats + arm.seat
        clock = self._process if seats > 1 else None
        return Place(process, round, position, after, arm.duplicate, clock)
