"""A sweep on several GPUs of one machine: a child process per GPU, and the problem sizes in the parent.

A child takes the sizes one by one, the longest first; of many it takes several, which share the fresh processes of the
confirmation. Rows of two GPUs are never compared, so a size stays with its GPU. Children store their rows themselves:
writes are idempotent and name the GPU, so that no row waits for the parent, and a killed child loses none.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fp8tune.errors import Fp8tuneError, MachineError
from fp8tune.fork_server import PRELOAD
from fp8tune.measure.backends import backend_on
from fp8tune.measure.gpus import Gpu
from fp8tune.stopping import END_SIGNALS, blocked_signals, stopping_cleanly
from fp8tune.store.results import Store
from fp8tune.sweeping import picks, planning, search, session
from fp8tune.sweeping.events import ChildDied, Event, Finished, Started
from fp8tune.sweeping.planning import Plan, ProblemPlan

MOST_DEATHS = 3  # of the children of one GPU, before the others do its sizes
MANY = 4  # sizes for each GPU that wait while children take several: these compile and are confirmed together
LEFT = 3  # sizes of an earlier sweep on another GPU that wait for it while a child begins one of them anew
END_S = 15.0  # for a child that was told to end

Clock = Callable[[], float]


def run(store: Store, plan: Plan, clock: Clock = time.monotonic, *, begun: float | None = None) -> Iterator[Event]:
    """Run a sweep on the GPUs of its plan as :func:`fp8tune.sweeping.session.run` does on one."""
    if len(plan.gpus) < 2:
        yield from session.run(store, plan, clock, begun=begun)
        return
    yield from sweep(store, session.with_published(store, plan), clock, begun=begun)
    picks.keep_current(store)


def sweep(store: Store, plan: Plan, clock: Clock = time.monotonic, *, begun: float | None = None) -> Iterator[Event]:
    """Run a plan on its GPUs, and on one of them in this process if there is one size.

    Closing the generator ends the children; every stored row stays.
    """
    if len(plan.gpus) > 1 and len(plan.problems) > 1:
        yield from _Parent(store, plan, clock, clock() if begun is None else begun).run()
        return
    (size, *_) = session.placed(store, plan).problems
    gpu = next((gpu for gpu in plan.gpus[1:] if size.device == plan.device_on(gpu, size)), None)
    yield from session.sweep(store, plan if gpu is None else replace(plan, backend=backend_on(gpu)), clock, begun=begun)


@dataclass(frozen=True)
class _Request:
    """A child's request for a size: for one more beside those that it has, or once there is one."""

    is_idle: bool


@dataclass
class _Child:
    """A process that sweeps on a GPU, as its parent sees it."""

    gpu: Gpu
    process: BaseProcess
    connection: Connection
    sizes: list[ProblemPlan] = field(default_factory=list)  # taken and not done
    is_idle: bool = False  # waits for a size

    def end(self) -> None:
        """End the process: at once, but with its rows stored and its own processes ended."""
        self.connection.close()
        self.process.terminate()
        self.process.join(END_S)
        self.process.kill()
        self.process.join()


@dataclass
class _Parent:
    """The sizes of a sweep, and the children that do them."""

    store: Store
    plan: Plan
    clock: Clock
    begun: float
    children: dict[Connection, _Child] = field(default_factory=dict)
    deaths: dict[Gpu, int] = field(default_factory=dict)
    end: Finished = field(default_factory=lambda: Finished(0.0))

    def __post_init__(self) -> None:
        self.started, options = self.clock(), self.plan.options
        self.deadline = self.begun + (math.inf if options.budget_s is None else options.budget_s)
        self.staying = set() if options.again else session.decided(self.store, self.plan)
        sizes = session.placed(self.store, self.plan).problems
        self.waiting = sorted(sizes, key=lambda size: -size.expected_s(quick=options.quick))
        share = search.SHARE if self.plan.is_confirmed else search.QUICK_SHARE
        budget_s = share * (self.deadline - self.started) * len(self.plan.gpus)
        self.is_search = not self.plan.is_partial and search.is_needed(self.plan, self.waiting, budget_s)
        if self.is_search:  # each size is visited several times, so its GPU has it from the beginning
            for number, size in enumerate(self.waiting):
                gpu = self.plan.gpus[number % len(self.plan.gpus)]
                self.waiting[number] = replace(size, device=size.device or self.plan.device_on(gpu, size))

    def run(self) -> Iterator[Event]:
        sizes = self.plan.problems
        yield Started(self.plan.backend.device, self.plan.backend.kind, len(sizes), sum(size.count for size in sizes))
        owners = [self._owner(size) for size in self.waiting]
        gpus = sorted(self.plan.gpus, key=lambda gpu: gpu not in owners)[: len(sizes)]
        try:
            for gpu in gpus:
                self._start(gpu)
            while self.children:
                for connection in wait([*self.children]):
                    yield from self._heard(self.children[connection])  # type: ignore[index]
                self._answer_idle()
        finally:
            for child in self.children.values():
                child.process.terminate()  # all at once: each may take seconds
            for child in self.children.values():
                child.end()
        left_out = self.end.left_out + sum(size.count for size in self.waiting)
        yield replace(self.end, seconds=self.clock() - self.started, left_out=left_out)

    def _start(self, gpu: Gpu) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, __name__])
        connection, remote = context.Pipe()
        cores = sorted(os.sched_getaffinity(0))
        number, count = self.plan.gpus.index(gpu), len(self.plan.gpus)
        share = cores[len(cores) * number // count : len(cores) * (number + 1) // count] or cores
        process = context.Process(target=_child, args=(remote, share))
        with blocked_signals():  # it may start the fork server
            process.start()
        remote.close()
        own = {item.name: getattr(self.plan, item.name) for item in fields(Plan)}
        own |= {"backend": gpu, "problems": ()}
        connection.send((self.store.url, own, self.begun))
        self.children[connection] = _Child(gpu, process, connection)

    def _heard(self, child: _Child) -> Iterator[Event]:
        try:
            message = child.connection.recv()
        except (EOFError, ConnectionResetError):
            yield self._died(child)
            return
        match message:
            case _Request(is_idle=True):
                child.is_idle = True
            case _Request():
                is_left = len(self.waiting) >= MANY * len(self.plan.gpus) and self.clock() <= self.deadline
                child.connection.send(self._take(child) if is_left else None)
            case Started():
                pass
            case Finished():
                child.sizes.clear()
                self.end = self.end.joined(message)
            case Fp8tuneError():
                raise message
            case _:
                yield message

    def _died(self, child: _Child) -> ChildDied:
        """Put the sizes of a child back that ended by itself, and start another one in its place a few times.

        Raises:
            MachineError: The children of all GPUs died too often.
        """
        del self.children[child.connection]
        child.end()
        code, gpu = child.process.exitcode or 0, child.gpu
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self.staying |= {size.problem for size in child.sizes}
        self.waiting = [*(replace(size, device=self.plan.device_on(gpu, size)) for size in child.sizes), *self.waiting]
        self.deaths[gpu] = self.deaths.get(gpu, 0) + 1
        if is_replaced := self.deaths[gpu] < MOST_DEATHS:
            self._start(gpu)
        elif not self.children:
            raise MachineError(
                f"the process of GPU {gpu.name} {reason}, as others before: run the same command to resume"
            )
        return ChildDied(gpu.name, reason, len(child.sizes), is_replaced)

    def _answer_idle(self) -> None:
        """Give sizes to children that wait for some; end all once nothing is left."""
        is_late = self.clock() > self.deadline
        idle = [child for child in self.children.values() if child.is_idle]
        for child in idle:
            sizes = [] if is_late else [size for size in [self._take(child)] if size is not None]
            while self.is_search and sizes and (size := self._take(child)) is not None:
                sizes.append(size)
            if sizes:
                child.is_idle = False
                child.connection.send((sizes, not self.is_search))
        if all(child.is_idle for child in self.children.values()) and (is_late or not self.waiting):
            is_whole = self.end.is_whole and not self.waiting
            self.end = replace(self.end, is_whole=is_whole)
            for child in self.children.values():
                with contextlib.suppress(BrokenPipeError):
                    child.connection.send(is_whole)
                child.process.join(END_S)
                child.end()
            self.children.clear()

    def _owner(self, size: ProblemPlan) -> Gpu | None:
        """Return the GPU that has begun a size, unless its children died too often."""
        gpus = (gpu for gpu in self.plan.gpus if self.deaths.get(gpu, 0) < MOST_DEATHS)
        return next((gpu for gpu in gpus if size.device == self.plan.device_on(gpu, size)), None)

    def _take(self, child: _Child) -> ProblemPlan | None:
        """Take the next size for a child: one that its GPU has begun, else a new one, else one of a busy GPU."""
        owners = list(map(self._owner, self.waiting))
        open_owners = [
            owner for owner, size in zip(owners, self.waiting, strict=True) if size.problem not in self.staying
        ]
        choices = [
            (owner != child.gpu, owner is not None, number)
            for number, (owner, size) in enumerate(zip(owners, self.waiting, strict=True))
            if owner in (None, child.gpu)
            or not (self.is_search or size.problem in self.staying or open_owners.count(owner) < LEFT)
        ]
        if not choices:
            return None
        size = self.waiting.pop(min(choices)[-1])
        child.sizes.append(size)
        return replace(size, device=None)


def _child(connection: Connection, cores: list[int]) -> None:
    """Sweep the sizes that the parent gives, and send it the events."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends its children
    with contextlib.suppress(BrokenPipeError, EOFError, ConnectionResetError), stopping_cleanly():  # it is gone
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        os.sched_setaffinity(0, cores)
        url, own, begun = connection.recv()
        if own["backend"].device.arch != "simulated":
            os.environ["CUDA_VISIBLE_DEVICES"] = own["backend"].name
        try:
            plan = Plan(**own | {"backend": backend_on(own["backend"])})
            with Store.open(url) as store, contextlib.closing(_events(connection, store, plan, begun)) as events:
                for event in events:
                    connection.send(event)
        except Fp8tuneError as error:
            connection.send(error)


def _events(connection: Connection, store: Store, plan: Plan, begun: float) -> Generator[Event, None, None]:
    """Yield the events of sweeps of the sizes that the parent gives."""

    def take(is_needed: bool) -> ProblemPlan | None:
        connection.send(_Request(is_idle=False))
        size: ProblemPlan | None = connection.recv()
        return size

    planning.make_ready(plan.backend)
    sweep_ids = set[int]()
    while True:
        connection.send(_Request(is_idle=True))
        answer = connection.recv()
        if isinstance(answer, bool):
            break
        sizes, may_take = answer
        own = replace(plan, problems=tuple(sizes))
        sweep_ids.add((yield from session.sweep(store, own, begun=begun, take=take if may_take else None, ends=False)))
    for sweep_id in sweep_ids if answer else ():  # all children are done: with --again, not even a part is repeated
        store.finish_sweep(sweep_id)
