"""A worker: takes units of its device until none are left, and sweeps them in batches.

The units of a batch are confirmed in the same fresh processes, which take seconds to start. A worker that is told to
end (Ctrl-C, SIGTERM, a closed generator) gives its units back at once. Those of one that was killed come back when
their leases end.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fp8tune.errors import DatabaseError, Fp8tuneError, MachineError, UsageError, one_line
from fp8tune.fleet import units
from fp8tune.fleet.heartbeat import renewing
from fp8tune.measure.backends import backend_for
from fp8tune.records import Kind, Problem, Status, shortfall
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import LEASE_S, RENEWALS, Lease, LeaseLostError, QueuedSweep, Unit
from fp8tune.sweeping import events, picks, planning, session
from fp8tune.sweeping.planning import Plan, ProblemPlan

BATCH_S = 180.0  # age of a batch at which it takes no other unit: its work may be lost with its worker
AHEAD = 16  # units that wait at least if a worker takes one early, to compile it beside the current one
ALONE = 3  # attempt from which on a unit is a batch of its own: it may be what ended the attempts before
WAIT_S = 2.0  # between looks at a queue in which nothing waits
LEAST_S = 5.0  # a worker with less of its time budget left takes no unit
MOST_FAILURES = 2  # batches that fail in a row before the worker ends: its GPU or host is at fault then


@dataclass(frozen=True)
class QueueEvent:
    """A step of a worker. What does not apply is None."""

    event: Literal["started", "taken", "done", "failed", "given back", "refused", "waiting", "ended"]
    worker: str
    unit: Unit | None = None
    reason: str = ""  # why it ended early; of a done unit, that no config is right on some problem sizes
    attempt: int | None = None
    seconds: float | None = None
    trials: int | None = None
    done: int | None = None
    failed: int | None = None
    running: int | None = None
    waiting: int | None = None  # units that wait for this device name


WorkerEvent = QueueEvent | events.Event

Do = Callable[..., Generator[events.Event, None, None]]
"""Sweeps the problem sizes of a plan and those that it takes, as :func:`fp8tune.sweeping.session.sweep` does."""


@dataclass
class Worker:
    """A worker on the first GPU that this process sees, or on the simulated one of ``timer``."""

    db: str = field(repr=False)
    timer: str | None = None
    wait: bool = False  # wait for units that are queued later, instead of ending when the queue is empty
    time_budget_s: float = math.inf
    kernels: Sequence[str] = ()  # foreign kernels that queued sweeps may import
    command: str = ""
    lease_s: float = LEASE_S
    do: Do = session.sweep
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    plans: dict[str, Plan] = field(default_factory=dict, repr=False)  # key of a queued sweep -> its plan here

    def run(self) -> Generator[WorkerEvent, None, None]:
        """Take units and do them. Closing the generator gives them back.

        Raises:
            MachineError: This machine has no GPU, or can do nothing of what waits.
            DatabaseError: The database cannot be used.
        """
        self.deadline = self.clock() + self.time_budget_s
        backend, _ = backend_for(None, self.timer)
        if not backend.times:
            raise MachineError("no GPU is here to time on: start workers where there is one, or with --timer")
        planning.make_ready(backend)
        if backend.kind is Kind.MEASURED:
            importlib.import_module("torch")  # seconds or, over a network, a minute: before there is a unit to lose
        self.device, gpu = backend.device.name, backend.device.uuid_hash[:4]
        name = os.environ.get("FP8TUNE_WORKER", "")
        self.name = name or f"{socket.gethostname()}:{os.getpid()}:{gpu}".rstrip(":")
        self.done = self.failed = self.failures_in_row = 0
        self.refused: dict[str, str] = {}  # key of a queued sweep -> why it cannot be done here
        self.leases: list[Lease] = []
        with Store.open(self.db, create=True, wait=True) as self.store:
            yield QueueEvent("started", self.name)
            if name:
                self.store.return_units_of(name, "its worker was lost")
            is_waiting = False
            while self.left_s() >= LEAST_S:
                if lease := self._lease():
                    is_waiting = False
                    yield from self._batch(lease)
                    continue
                counts = self.store.count_units(self.device, without=[*self.refused])
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
            waiting = self.store.count_units(self.device)[UnitState.WAITING]
            yield QueueEvent("ended", self.name, reason=reason, done=self.done, failed=self.failed, waiting=waiting)

    def left_s(self) -> float:
        """Return the seconds that are left of the time budget."""
        return max(0.0, self.deadline - self.clock())

    def _lease(self, last_kernel: str = "") -> Lease | None:
        without, lease_s = [*self.refused], self.lease_s
        return self.store.take_unit(self.device, self.name, last_kernel=last_kernel, without=without, lease_s=lease_s)

    def _batch(self, lease: Lease) -> Iterator[WorkerEvent]:
        """Do a unit and those that are taken beside it. No lease is held afterwards, whatever happens."""
        self.leases[:] = [lease]
        try:
            yield from self._swept(lease)
        except LeaseLostError as error:
            yield from self._return_units("given back", str(error))
        except units.OtherCodeError as error:
            self.refused[lease.sweep.key] = str(error)
            yield from self._return_units("refused", str(error))
        except Exception as error:
            is_known = isinstance(error, Fp8tuneError)
            reason = str(error) if is_known else one_line(error)
            self.failures_in_row += 1
            self.failed += len(self.leases)
            yield from self._return_units("failed", reason)
            if isinstance(error, DatabaseError) or not is_known:
                raise
            if self.failures_in_row >= MOST_FAILURES:
                raise MachineError(f"{MOST_FAILURES} units in a row failed here, the last: {reason}") from None
        except BaseException:  # a signal, or the generator was closed
            self._return_units("given back", "its worker was told to end")
            raise

    def _return_units(self, event: Literal["given back", "refused", "failed"], reason: str) -> list[QueueEvent]:
        """Give all units back, or have them tried again after a failure."""
        leases, self.leases[:] = [*self.leases], []
        for lease in leases:
            with contextlib.suppress(DatabaseError):  # the lease was lost, or ends by itself
                (self.store.fail_unit if event == "failed" else self.store.give_back_unit)(lease, reason)
        return [QueueEvent(event, self.name, lease.unit, reason) for lease in leases]

    def _swept(self, first: Lease) -> Iterator[WorkerEvent]:
        """Sweep units until the batch is full or none waits, and finish each as soon as it is decided."""
        begun, is_full, end = self.clock(), first.attempt >= ALONE, events.Finished(0.0)
        batch, trials, news = dict[Problem, tuple[Lease, float]](), Counter[Problem](), list[QueueEvent]()
        renewed = renewing(self.db, self.leases, self.lease_s / RENEWALS)
        with renewed as sign, self.store.fenced(self.leases), contextlib.ExitStack() as stack:
            yield QueueEvent("taken", self.name, first.unit, attempt=first.attempt)
            plan = self._plan(first.sweep)
            sizes = {units.problem_key(size): size for size in plan.problems}

            def take(is_needed: bool) -> ProblemPlan | None:
                nonlocal is_full
                is_full |= self.clock() - begun > BATCH_S or self.left_s() < LEAST_S
                is_early = not is_needed and self.store.count_units(self.device)[UnitState.WAITING] < AHEAD
                if is_full or is_early or (lease := self._lease(first.unit.kernel)) is None:
                    return None
                size = sizes.get(lease.unit.problems[0])
                if size is None or lease.sweep.key != first.sweep.key or lease.attempt >= ALONE:
                    is_full = True
                    self.store.give_back_unit(lease, "its worker does it in another batch")
                    return None
                self.leases.append(lease)
                batch[size.problem] = lease, self.clock()
                news.append(QueueEvent("taken", self.name, lease.unit, attempt=lease.attempt))
                return size

            if (size := sizes.get(first.unit.problems[0])) is None:
                raise units.OtherCodeError(
                    f"{first.unit.kernel} of the unit is {first.unit.source_hash} and has other code or sizes here: "
                    "install the fp8tune and kernels that queued it, or queue the sweep again"
                )
            batch[size.problem] = first, begun
            # The key of a batch is this GPU's, so that it continues an interrupted batch.
            key = units.digest([first.sweep.key, plan.backend.device.fingerprint, plan.backend.timer])
            options = replace(plan.options, budget_s=None if self.deadline == math.inf else self.left_s())
            own = replace(plan, key=key, problems=(size,), options=options)
            running = stack.enter_context(contextlib.closing(self.do(self.store, own, self.clock, take=take)))
            for event in running:
                sign()
                yield from news
                news.clear()
                match event:
                    case events.TrialDone(row, from_database=False):
                        trials[row.problem] += 1
                    case events.SizeDone(problem):
                        finding, (lease, start_s) = self._finding(plan, problem), batch[problem]
                        self.leases.remove(lease)
                        self.store.finish_unit(lease, finding)
                        self.done, self.failures_in_row = self.done + 1, 0
                        seconds, count = self.clock() - start_s, trials[problem]
                        yield QueueEvent("done", self.name, lease.unit, finding, seconds=seconds, trials=count)
                    case events.Finished():
                        end = event
                yield event
            if end.left_out:
                self.deadline = self.clock()
                yield from self._return_units("given back", "the time budget of its worker is over")
            elif self.leases:
                raise Fp8tuneError("some sizes could not be built or timed: fp8tune show --failed has the reasons")

    def _finding(self, plan: Plan, problem: Problem) -> str:
        """Return that no config of a problem size is right; empty if one is."""
        sizes = tuple(size for size in plan.problems if size.problem == problem)
        for tally in session.tallies(self.store, replace(plan, problems=sizes)):
            if not tally.has_right:
                status = next((outcome.status for outcome in tally.failures.values()), Status.PRUNED)
                return f"{shortfall(status)} on {tally.subject.problem.shape}: {status}"
        return ""

    def _plan(self, sweep: QueuedSweep) -> Plan:
        """Expand a queued sweep, once. What this host lacks is not a failure of the unit."""
        if sweep.key not in self.plans:
            try:
                plan = units.plan_of(sweep, timer=self.timer, command=self.command, kernels=self.kernels)
            except UsageError as error:
                raise units.OtherCodeError(str(error)) from None
            self.plans[sweep.key] = session.with_published(self.store, plan)
        return self.plans[sweep.key]
