"""A worker: takes units of its device until none are left, and sweeps each.

A worker that is told to end (Ctrl-C, SIGTERM, a closed generator) gives its unit back at once. The unit of one that was
killed comes back when its lease ends.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fp8tune.errors import DatabaseError, Fp8tuneError, MachineError, UsageError, one_line
from fp8tune.fleet import units
from fp8tune.fleet.heartbeat import Heartbeat
from fp8tune.measure.backends.choice import backend_for
from fp8tune.records import Kind, Status, shortfall
from fp8tune.store.results import Store, Tally
from fp8tune.store.schema import UnitState
from fp8tune.store.units import LEASE_S, Lease, LeaseLostError, Unit
from fp8tune.sweeping import events, picks, planning, session
from fp8tune.sweeping.loop import sweep
from fp8tune.sweeping.planning import Plan, ProblemPlan
from fp8tune.sweeping.published import with_published

WAIT_S = 2.0
"""Seconds between looks at a queue in which nothing waits."""
TOGETHER_S = 1.0
"""Trials that come within this time are stored in one commit, because writers of a database take turns."""
LEAST_S = 5.0
"""A worker with less of its time budget left takes no unit."""
MOST_FAILURES = 2
"""Units that fail in a row before the worker ends: its GPU or host is at fault then."""


@dataclass(frozen=True)
class QueueEvent:
    """A step of a worker. What does not apply is None."""

    event: Literal["started", "taken", "done", "failed", "given back", "refused", "waiting", "ended"]
    worker: str
    unit: Unit | None = None
    reason: str = ""
    """Why a unit or the worker ended early; of a done unit, that no config is right on some problem sizes."""
    attempt: int | None = None
    seconds: float | None = None
    trials: int | None = None
    done: int | None = None
    failed: int | None = None
    running: int | None = None
    waiting: int | None = None
    """Units that wait for this device name."""


WorkerEvent = QueueEvent | events.Event


class _OutOfTimeError(Fp8tuneError):
    """The time budget left trials of a unit out."""


def unit_events(store: Store, plan: Plan) -> Iterator[events.Event]:
    """Sweep the problem sizes of a unit."""
    return sweep(store, with_published(store, plan))


@dataclass
class Worker:
    """A worker on the first GPU that this process sees, or on the simulated one of ``timer``."""

    db: str = field(repr=False)
    timer: str | None = None
    wait: bool = False
    """Wait for units that are queued later, instead of ending when the queue is empty."""
    time_budget_s: float = math.inf
    kernels: Sequence[str] = ()
    """Foreign kernels that queued sweeps may import."""
    command: str = ""
    lease_s: float = LEASE_S
    do: Callable[[Store, Plan], Iterator[events.Event]] = unit_events
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    plans: dict[str, tuple[Plan, Mapping[str, ProblemPlan]]] = field(default_factory=dict, repr=False)
    """Sweep key -> its plan here, and the problem sizes of it by the keys that units name."""

    def run(self) -> Generator[WorkerEvent, None, None]:
        """Take units and do them. Closing the generator gives the current unit back.

        Raises:
            MachineError: This machine has no GPU, or can do nothing of what waits.
            DatabaseError: The database cannot be used.
        """
        self.deadline = self.clock() + self.time_budget_s
        backend, _ = backend_for(None, self.timer)
        if not backend.times:
            raise MachineError("there is no GPU here to work on: start workers where there is one, or with --timer")
        planning.make_ready(backend)
        if backend.kind is Kind.MEASURED:
            importlib.import_module("torch")  # seconds or, over a network, a minute: before there is a unit to lose
        device, gpu = backend.device.name, backend.device.uuid_hash[:4]
        name = os.environ.get("FP8TUNE_WORKER", "")
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{gpu}".rstrip(":")
        self.done = self.failed = self.failures_in_row = 0
        self.refused: dict[str, str] = {}
        with Store.open(self.db, create=True, wait=True) as self.store:
            yield QueueEvent("started", self.name)
            if name:
                self.store.return_units_of(name, "its worker was lost")
            is_waiting = False
            while self.left_s() >= LEAST_S:
                if lease := self.store.take_unit(device, self.name, without=[*self.refused], lease_s=self.lease_s):
                    is_waiting = False
                    yield from self._unit(lease)
                    continue
                counts = self.store.count_units(device, without=[*self.refused])
                if not (self.wait or counts[UnitState.RUNNING] or counts[UnitState.WAITING]):
                    break
                if not is_waiting:
                    yield QueueEvent("waiting", self.name, running=counts[UnitState.RUNNING])
                is_waiting = True
                self.sleep(min(WAIT_S, self.left_s()))
            if not self.store.count_units()[UnitState.RUNNING]:
                picks.keep_current(self.store)
            if self.refused and not self.done:
                raise MachineError(next(iter(self.refused.values())))
            reason = "the time budget is over" if self.left_s() < LEAST_S else ""
            waiting = self.store.count_units(device)[UnitState.WAITING]
            yield QueueEvent("ended", self.name, reason=reason, done=self.done, failed=self.failed, waiting=waiting)

    def left_s(self) -> float:
        """Return the seconds that are left of the time budget."""
        return max(0.0, self.deadline - self.clock())

    def _unit(self, lease: Lease) -> Iterator[WorkerEvent]:
        yield QueueEvent("taken", self.name, lease.unit, attempt=lease.attempt)
        try:
            yield (yield from self._attempt(lease))
        except LeaseLostError as error:
            yield QueueEvent("given back", self.name, lease.unit, str(error))
        except _OutOfTimeError as error:
            self.deadline = self.clock()
            yield self._given_back(lease, str(error))
        except units.OtherCodeError as error:
            self.refused[lease.sweep.key] = str(error)
            self._given_back(lease, str(error))
            yield QueueEvent("refused", self.name, lease.unit, str(error))
        except Exception as error:
            is_known = isinstance(error, Fp8tuneError)
            reason = str(error) if is_known else one_line(error)
            self.failed, self.failures_in_row = self.failed + 1, self.failures_in_row + 1
            with contextlib.suppress(DatabaseError):  # the lease was lost, or the server is gone
                self.store.fail_unit(lease, reason)
            yield QueueEvent("failed", self.name, lease.unit, reason)
            if isinstance(error, DatabaseError) or not is_known:
                raise
            if self.failures_in_row >= MOST_FAILURES:
                raise MachineError(f"{MOST_FAILURES} units in a row failed here, the last: {reason}") from None
        except BaseException:  # a signal, or the generator was closed
            self._given_back(lease, "its worker was told to end")
            raise

    def _given_back(self, lease: Lease, reason: str) -> QueueEvent:
        with contextlib.suppress(DatabaseError):  # the lease ends by itself
            self.store.give_back_unit(lease, reason)
        return QueueEvent("given back", self.name, lease.unit, reason)

    def _attempt(self, lease: Lease) -> Generator[WorkerEvent, None, QueueEvent]:
        """Do a unit and finish it."""
        unit, heart, begun, trials, end = lease.unit, Heartbeat(), self.clock(), 0, events.Finished(0, 0.0)
        with heart.renewing(self.db, lease), self.store.fenced(lease), self.store.adding_together(TOGETHER_S):
            budget_s = None if self.deadline == math.inf else self.left_s()
            plan = units.of_unit(*self._plan(lease), unit, budget_s)
            for event in self.do(self.store, plan):
                heart.sign()
                if heart.is_lost:
                    raise LeaseLostError(f"unit {unit.key} of {unit.kernel} was given to another worker")
                trials += isinstance(event, events.TrialDone) and not event.from_database
                end = event if isinstance(event, events.Finished) else end
                yield event
            if end.left_out:
                raise _OutOfTimeError("the time budget of its worker is over")
            if not end.is_whole:
                raise Fp8tuneError("some sizes could not be built or timed: fp8tune show --failed has the reasons")
            finding = _finding(session.tallies(self.store, plan))
            self.store.finish_unit(lease, finding)
        self.done, self.failures_in_row = self.done + 1, 0
        return QueueEvent("done", self.name, unit, finding, seconds=self.clock() - begun, trials=trials)

    def _plan(self, lease: Lease) -> tuple[Plan, Mapping[str, ProblemPlan]]:
        """Expand a sweep, once. What this host lacks is not a failure of the unit."""
        sweep = lease.sweep
        if sweep.key not in self.plans:
            try:
                plan = units.plan_of(sweep, timer=self.timer, command=self.command, kernels=self.kernels)
            except UsageError as error:
                raise units.OtherCodeError(str(error)) from None
            self.plans[sweep.key] = plan, {units.problem_key(problem): problem for problem in plan.problems}
        return self.plans[sweep.key]


def _finding(tallies: Sequence[Tally]) -> str:
    """Name a problem size without a right config; empty if each has one."""
    without = [tally for tally in tallies if not tally.has_right]
    if not without:
        return ""
    status = next((outcome.status for outcome in without[0].failures.values()), Status.PRUNED)
    first = str(without[0].subject.problem.shape)
    where = f"{len(without)} of {len(tallies)} problem sizes, first {first}" if len(tallies) > 1 else first
    return f"{shortfall(status)} on {where}: {status}"
