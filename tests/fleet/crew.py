"""Workers on simulated GPUs, in this process or in processes that are killed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8tune.exporting import select_rows
from fp8tune.fleet import units
from fp8tune.fleet.worker import Do, QueueEvent, Worker, WorkerEvent
from fp8tune.measure.arms import Place
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.options import SweepOptions
from fp8tune.plan.shapes import Selection
from fp8tune.records import NamedInts
from fp8tune.store.results import Store
from fp8tune.store.units import QueuedSweep
from fp8tune.sweeping import planning
from fp8tune.sweeping.events import Event, SizeDone, TrialDone
from fp8tune.sweeping.planning import Plan, ProblemPlan
from fp8tune.tables.current import NO_TABLES

DEVICE = "simulated:1"
FEW = ("num_warps=4,8", "BLOCK_SIZE=2", "BLOCK_SIZE_ITER=8192", "num_stages=1")
"""Of rowwise-2d: the default and another config."""
LEASE_S = 2.0

Clock = Callable[[], float]
Take = Callable[[bool], ProblemPlan | None]


def plan_of(count: int, *, quick: bool = True) -> Plan:
    short = planning.planned(SweepOptions(kernel=("rowwise-2d",), timer=DEVICE, quick=quick, grid=FEW, shapes=()))
    rows = tuple(NamedInts(M=1024, K=128 * (1 + number), E=1, N=128) for number in range(count))
    return planning.expanded(replace(short, selections=(Selection(rows),)))


def queue(db: str, plan: Plan) -> QueuedSweep:
    """Queue a plan."""
    with Store.open(db, create=True) as store:
        return units.add(store, plan)[0]


def worked(db: str, gpu: int = 0, do: Do | None = None, **options: object) -> Iterator[WorkerEvent]:
    """Yield the events of a worker that looks often at a queue in which nothing waits."""
    values = {
        "lease_s": LEASE_S,
        "sleep": lambda seconds: time.sleep(min(seconds, 0.1)),
        **({} if do is None else {"do": do}),
        **options,
    }
    return Worker(db, f"{DEVICE},gpu={gpu}", **values).run()  # type: ignore[arg-type]


def known(plan: Plan, gpu: int) -> dict[str, Plan]:
    """Return what a worker would plan, to save the seconds that it takes in each of many processes."""
    return {units.queued(plan).key: replace(plan, backend=SimulatedBackend(f"{DEVICE},gpu={gpu}"))}


def of_type(events: Iterator[WorkerEvent], *kinds: str) -> list[QueueEvent]:
    return [event for event in events if isinstance(event, QueueEvent) and event.event in kinds]


def timed_once(store: Store, plan: Plan, clock: Clock, /, *, take: Take) -> Generator[Event, None, None]:
    """Time each config of each problem once, and store it: the least that a unit can be."""
    backend = plan.backend
    sweep_id = store.begin_sweep(plan.key, backend.device, command="", commit="", timer=backend.timer, seed=0)
    size: ProblemPlan | None = plan.problems[0]
    while size is not None:
        for config in size.configs:
            outcome = backend.worker().block(size.arm(config), Place())
            row = plan.row(size, config, outcome, Place(), outcome.process)
            store.add(sweep_id, row, once=True)
            yield TrialDone(row, from_database=False)
        store.mark_complete(sweep_id, plan.subject(size), len(size.configs))
        yield SizeDone(size.problem)
        size = take(True)


def table(db: str) -> str:
    """Return the exported table of a database."""
    with Store.open(db, writable=False) as store:
        selection = select_rows(store, "simulated", tables=NO_TABLES)
    return "\n".join((selection.table.render(), *selection.notices))


@dataclass
class Crew:
    """Worker processes, each on a simulated GPU of its own. Another takes the place of one that is killed.

    The first that has a trial kills itself, so that one kill at least is inside a unit.
    """

    db: str
    folder: Path
    plan: Plan
    do: Do | None = None
    killed: int = 0
    gpus: dict[int, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def start(self) -> None:
        gpu = next(self.numbers)
        child = os.fork()
        if child == 0:
            try:
                with (self.folder / "done").open("ab", buffering=0) as log:
                    for event in worked(self.db, gpu, self.do, plans=known(self.plan, gpu)):
                        if isinstance(event, TrialDone) and self._is_first():
                            os.kill(os.getpid(), signal.SIGKILL)
                        if isinstance(event, QueueEvent) and event.event == "done" and event.unit:
                            log.write(f"{event.unit.key}\n".encode())
                os._exit(0)
            finally:
                os._exit(1)
        self.gpus[child] = gpu

    def _is_first(self) -> bool:
        try:
            (self.folder / "first").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def run(self, workers: int, kills: int) -> list[str]:
        """Work the queue off. Returns the keys of the units that workers said to have done."""
        for _ in range(workers):
            self.start()
        next_kill = time.monotonic() + 1.0
        try:
            while self.gpus:
                time.sleep(0.05)
                if self.killed < kills and time.monotonic() >= next_kill:
                    os.kill(self.random.choice(sorted(self.gpus)), signal.SIGKILL)
                    next_kill += 0.3
                for child in list(self.gpus):
                    pid, status = os.waitpid(child, os.WNOHANG)
                    if pid:
                        del self.gpus[child]
                        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                            self.killed += 1
                            self.start()
                        else:
                            assert status == 0
        finally:
            for child in self.gpus:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return (self.folder / "done").read_text().split()
