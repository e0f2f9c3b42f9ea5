"""One worker: takes units of its device name until none are left, and does each as a sweep of its own.

A worker that is told to end (Ctrl-C, SIGTERM, a closed generator) gives its unit back at once. One that is killed, or
whose host is gone, stops renewing its lease, and the unit comes back when that ends.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field

from fp8tune.errors import DatabaseError, Fp8tuneError, MachineError, UsageError, one_line
from fp8tune.fleet import run, trust, units
from fp8tune.fleet.events import (
    Notice,
    Preparing,
    SweepRefused,
    UnitDone,
    UnitFailed,
    UnitReturned,
    UnitTaken,
    Waiting,
    WorkerEnded,
    WorkerEvent,
    WorkerStarted,
)
from fp8tune.fleet.imports import Imports
from fp8tune.fleet.lease import Heartbeat
from fp8tune.fleet.outcomes import Outcomes
from fp8tune.measure.backends.choice import backend_for
from fp8tune.measure.engine import Backend
from fp8tune.records import Kind
from fp8tune.store.results import Store
from fp8tune.store.units import LEASE_S, Lease, LeaseLostError, QueuedSweep, UnitState
from fp8tune.sweep import picks, planning
from fp8tune.sweep.events import Event, Finished, TrialDone
from fp8tune.sweep.loop import sweep
from fp8tune.sweep.planning import Plan, ProblemPlan
from fp8tune.sweep.published import with_published

WAIT_S = 0.5
"""Seconds between looks at a queue in which nothing waits."""

MOST_FAILURES = 2
"""Units that fail in a row before the worker ends: then its GPU or its host is at fault, and others do better."""

TOGETHER_S = 1.0
"""Trials of a unit that come within so long are stored in one commit: writers of one database take turns. A worker that
is killed loses them, and with it its unit, which another GPU begins anew."""

LEAST_S = 5.0
"""With less of its time budget left a worker takes no other unit: not one problem would be screened."""


Do = Callable[[Store, Plan], Iterator[Event]]
"""What is done with a unit: its events come from its plan, and its rows go into the store."""


class UnfinishedError(Fp8tuneError):
    """A unit's sweep did not come to its end."""


class OutOfTimeError(UnfinishedError):
    """Its time budget left something out: also what would have ended too late, so that some of it may be left."""


@dataclass(frozen=True)
class WorkerOptions:
    """How one worker works."""

    db: str
    """A path or URL. Never put one with a password on a command line: see :data:`fp8tune.store.location.VARIABLE`."""
    timer: str | None = None
    """None for the GPU that this process sees first; ``simulated:SEED`` for a made-up one."""
    wait: bool = False
    """Wait for units that are queued later, instead of ending when the queue is empty."""
    time_budget_s: float = math.inf
    name: str = ""
    """Who it is in ``fp8tune queue``; empty for host and process."""
    lease_s: float = LEASE_S
    """After which its unit comes back if it dies."""
    command: str = ""
    imports: Imports = field(default_factory=Imports)
    """Foreign code that it may import. Units that need other code are left to other workers."""


def work(
    options: WorkerOptions,
    do: Do | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[WorkerEvent, None, None]:
    """The events of a worker, from its first to its last unit. Closing the generator gives back the unit at hand.

    ``do``: what is done with a unit, :func:`fp8tune.sweep.loop.sweep` if not given. Raises MachineError where this
    machine has no GPU, DatabaseError where the database cannot be used.
    """
    backend, _ = backend_for(None, options.timer)
    if not backend.times:
        raise MachineError("there is no GPU here to work on: start workers where there is one, or with --timer")
    planning.make_ready(backend)
    importing = None
    if backend.kind is Kind.MEASURED:  # else it is imported where a kernel does so
        importing = threading.Thread(target=importlib.import_module, args=("torch",), daemon=True)
        importing.start()  # 3 s, or a minute over a network: beside the database and the look at the GPU
    with Store.open(options.db, create=True) as store:
        yield from _Worker(options, store, backend, do, clock, sleep, importing).run()


@dataclass
class _Worker:
    options: WorkerOptions
    store: Store
    backend: Backend
    do: Do | None
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    importing: threading.Thread | None
    """Of what a plan needs: done before there is a unit to lose."""
    done: int = 0
    failed: int = 0
    failures_in_row: int = 0
    last_kernel: str = ""
    is_prepared: bool = False
    is_waiting: bool = False
    is_out_of_time: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    """Key of a sweep -> why its units are left alone."""
    quick: set[str] = field(default_factory=set)
    """Keys of sweeps without finals, of which it had a unit."""
    plans: dict[str, tuple[Plan, Mapping[str, ProblemPlan]]] = field(default_factory=dict)
    """Key of a sweep -> its plan here, and the problems of it by their keys."""
    outcomes: Outcomes = field(default_factory=Outcomes)
    """Of the last unit."""
    findings: int = 0
    """Units that are done, but with a problem that no config is right on."""

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.options.time_budget_s
        where = self.backend.device.uuid_hash[:4]
        self._name = self.options.name or f"{socket.gethostname()}:{os.getpid()}" + (f":{where}" if where else "")
        self._guard = trust.Guard(self.store, self.backend, self._name, self.clock)

    def run(self) -> Iterator[WorkerEvent]:
        """See :func:`work`."""
        yield WorkerStarted(self._name, self.backend.device)
        has_worked = False
        while not (reason := self._why_to_end()):
            lease = None
            if has_worked or self._counts()[UnitState.WAITING]:
                try:
                    yield from self._looked_after()
                except trust.UntrustedError as fault:
                    reason = f"its GPU is not relied on: {fault}"
                    break
                lease = self._take()
            if has_worked := lease is not None:
                self.is_waiting = False
                yield from self._unit(lease)
                continue
            counts = self._counts()
            if counts[UnitState.RUNNING] or counts[UnitState.WAITING] or self.options.wait:
                if not self.is_waiting:
                    yield Waiting(counts[UnitState.RUNNING])
                self.is_waiting = True
                self.sleep(min(WAIT_S, max(0.0, self._left_s())))
            else:
                break
        if not self.store.count_units()[UnitState.RUNNING]:
            picks.keep_current(self.store)
        is_in_vain = bool(reason) and not self.is_out_of_time and self._left_s() >= LEAST_S
        if not reason and self.refused and not self.done:
            reason, is_in_vain = next(iter(self.refused.values())), True
        waiting = self.store.count_units(self.backend.device.name)[UnitState.WAITING]
        left_s = run.left_s(self.store.queue(), 1) if waiting else 0.0
        yield WorkerEnded(self.done, self.failed, reason, waiting, left_s, is_in_vain, self.findings)

    def _counts(self, but_for: Collection[str] = ()) -> Counter[UnitState]:
        return self.store.count_units(self.backend.device.name, without=[*self.refused, *but_for])

    def _looked_after(self) -> Iterator[WorkerEvent]:
        """Between units, while nothing runs on the GPU. Raises UntrustedError."""
        if self.is_prepared:
            self._guard.examine()
            if self._guard.waits_for_finals and self._counts(self.quick)[UnitState.WAITING]:
                yield from map(Notice, self._guard.calibrated(self._left_s(), self._finals_s()))
            return
        yield Preparing()
        yield from map(Notice, self._guard.prepare(self._left_s(), self._finals_s()))
        if self.importing is not None:
            self.importing.join()
        self.is_prepared = True

    def _finals_s(self) -> float:
        """Of what waits for this device name. It reads every unit of the queue: 24 ms for 500 in a file."""
        return run.finals_s(self.store.queue(), self.backend.device.name)

    def _why_to_end(self) -> str:
        """Empty while there is no reason."""
        if self.failures_in_row >= MOST_FAILURES:
            return f"{MOST_FAILURES} units in a row failed here"
        return "the time budget is over" if self.is_out_of_time or self._left_s() < LEAST_S else ""

    def _take(self) -> Lease | None:
        without = list(self.refused)
        lease = self.store.take_unit(
            self.backend.device.name,
            self._name,
            last_kernel=self.last_kernel,
            without=without,
            lease_s=self.options.lease_s,
        )
        self.last_kernel = lease.unit.kernel if lease else self.last_kernel
        return lease

    def _left_s(self) -> float:
        return self._deadline - self.clock()

    def _unit(self, lease: Lease) -> Iterator[WorkerEvent]:
        """One unit, from its lease to its end."""
        unit, begun, self.outcomes = lease.unit, self.clock(), Outcomes()
        if not units.has_finals(lease.sweep):
            self.quick.add(lease.sweep.key)
        yield UnitTaken(unit, lease.attempt)
        try:
            with (
                Heartbeat(self.options.db, lease) as heart,
                self.store.fenced(lease),
                self.store.adding_together(TOGETHER_S),
            ):
                whole, by_key = self._plan(lease.sweep)
                plan = units.of_unit(whole, unit, self._budget_s(), known=by_key)
                for event in (self.do or swept)(self.store, plan):
                    heart.beat()
                    yield event
                    if isinstance(event, TrialDone):
                        self.outcomes.take(event)
                finding = self.outcomes.finding(len(unit.problems))
                self.store.finish_unit(lease, finding)
        except LeaseLostError as lost:
            yield UnitReturned(unit, str(lost))
        except units.OtherCodeError as other:
            self.refused[lease.sweep.key] = str(other)
            self._give_back(lease, str(other))
            yield SweepRefused(lease.sweep.key, str(other))
        except UnfinishedError as unfinished:
            if self._left_s() > 0 and not isinstance(unfinished, OutOfTimeError):
                yield from self._fail(lease, str(unfinished))
                return
            self.is_out_of_time = True
            self._give_back(lease, "the time budget of its worker was over")
            yield UnitReturned(unit, "the time budget is over")
        except Exception as error:
            known = isinstance(error, Fp8tuneError)
            yield from self._fail(lease, str(error) if known else one_line(error))
            if isinstance(error, DatabaseError) or not known:
                raise
        except BaseException:  # a signal, or whoever reads the events has enough
            self._give_back(lease, "its worker was told to end")
            raise
        else:
            self.done, self.failures_in_row, self.findings = self.done + 1, 0, self.findings + bool(finding)
            yield UnitDone(unit, self.clock() - begun, self.outcomes.trials, finding)

    def _budget_s(self) -> float | None:
        left_s = self._left_s()
        return None if left_s == math.inf else max(0.0, left_s)

    def _plan(self, sweep: QueuedSweep) -> tuple[Plan, Mapping[str, ProblemPlan]]:
        """Expanded once a worker. What this host lacks is no failure of the unit."""
        if sweep.key not in self.plans:
            try:
                of = self.options
                plan = units.plan_of(sweep, timer=of.timer, command=of.command, imports=of.imports)
            except UsageError as lacking:
                raise units.OtherCodeError(str(lacking)) from None
            self.plans[sweep.key] = plan, units.by_key(plan)
        return self.plans[sweep.key]

    def _fail(self, lease: Lease, reason: str) -> Iterator[WorkerEvent]:
        self.failed += 1
        self.failures_in_row += 1
        try:
            state = self.store.fail_unit(lease, reason)
        except DatabaseError as lost:  # a lease that is another's by now, or a server that is gone: it ends
            yield UnitReturned(lease.unit, str(lost))
        else:
            yield UnitFailed(lease.unit, reason, state is UnitState.FAILED)

    def _give_back(self, lease: Lease, reason: str) -> None:
        with contextlib.suppress(DatabaseError):  # a lease that is lost already, or a server that is gone: it ends
            self.store.give_back_unit(lease, reason)


def swept(store: Store, plan: Plan) -> Iterator[Event]:
    """Sweep a unit's problems. Raises UnfinishedError."""
    ended = Finished(0, 0.0)
    for event in sweep(store, with_published(store, plan)):
        ended = event if isinstance(event, Finished) else ended
        yield event
    if ended.left_out:
        raise OutOfTimeError(f"the time budget left {ended.left_out} trials out")
    if not ended.is_whole:
        raise UnfinishedError("not all of its problems could be built and timed: fp8tune show --failed has the reasons")
