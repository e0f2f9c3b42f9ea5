"""Workers on made-up GPUs: units a second, statements a second, and what is left when they are killed at random.

python -m benchmarks.fleet throughput --db fleet.db
python -m benchmarks.fleet chaos --units 500 --finals --db chaos.db
python -m benchmarks.fleet chaos --db postgresql://me@127.0.0.1/chaos --restart 'pg_ctl -D data -m immediate restart'
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune.exporting import select_rows
from fp8tune.fleet import units, worker
from fp8tune.fleet.events import UnitDone, WorkerEvent
from fp8tune.measure.arms import Place
from fp8tune.records import NamedInts
from fp8tune.store import units as store_units
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import QueuedSweep
from fp8tune.sweep import planning
from fp8tune.sweep.events import Event, TrialDone
from fp8tune.sweep.options import Options
from fp8tune.sweep.planning import Plan
from fp8tune.tables.current import NO_TABLES

DEVICE = "simulated:1"
FEW = ("num_warps=4,8", "BLOCK_SIZE=2", "BLOCK_SIZE_ITER=8192", "num_stages=1")
"""Of rowwise-2d: the default and another config."""

LEASE_S = 2.0
"""Of workers that are killed: nobody waits a minute here."""

TOGETHER = 30
"""Trials of a commit: what a screen on an H100 makes in a second."""

Do = Callable[[Store, Plan], Iterator[Event]]


def plan_of(count: int, *, quick: bool = True) -> Plan:
    """A plan of so many problems of one kernel."""
    short = planning.planned(Options(("rowwise-2d",), timer=DEVICE, quick=quick, grid=FEW, shapes=()))
    rows = tuple(NamedInts(M=1024, K=128 * (1 + number), E=1, N=128) for number in range(count))
    return planning.expanded(replace(short, rows=rows))


def queue(store: Store, plan: Plan) -> QueuedSweep:
    """Queue a plan, a unit a problem."""
    sweep = units.queued(plan)
    alone = (replace(plan, problems=(of,)) for of in plan.problems)
    store.add_units(sweep, [unit for one in alone for unit in units.units_of(one, sweep.key)])
    return sweep


def worked(
    db: str, gpu: int = 0, do: Do | None = None, lease_s: float = LEASE_S, time_budget_s: float = math.inf
) -> Iterator[WorkerEvent]:
    """The events of a worker on one of the made-up GPUs. Below 220 s it checks no config before its first."""
    options = worker.WorkerOptions(db, f"{DEVICE},gpu={gpu}", time_budget_s=time_budget_s, lease_s=lease_s)
    return worker.work(options, do)


def timed_once(store: Store, plan: Plan) -> Iterator[Event]:
    """Time each config of each problem once, and store it: the least that a unit can be."""
    backend = plan.backend
    named = {"command": "", "commit": "", "timer": backend.timer, "seed": 0}
    sweep_id = store.begin_sweep(plan.key, backend.device, **named)  # type: ignore[arg-type]
    for of in plan.problems:
        for config in of.configs:
            outcome = backend.worker().block(of.arm(config), Place())
            row = plan.row(of, config, outcome, Place(), outcome.process)
            store.add(sweep_id, row, once=True)
            yield TrialDone(row, from_database=False)
        store.mark_complete(sweep_id, plan.subject(of), len(of.configs))


def table(db: str) -> str:
    """What is exported of a database: every row of the table of the simulated arch."""
    with Store.open(db, writable=False) as store:
        selection = select_rows(store, "simulated", tables=NO_TABLES)
    return "\n".join((selection.table.render(), *selection.notices))


# Workers that are killed


class Crew:
    """Worker processes, each on a made-up GPU of its own. Another takes the place of one that is killed.

    The first that has a trial kills itself: whenever else workers are killed, one kill is within a unit.
    """

    def __init__(self, db: str, log: Path, workers: int, do: Do | None, time_budget_s: float) -> None:
        self._db, self._log, self._workers, self._work = db, log, workers, (do, LEASE_S, time_budget_s)
        self._random = random.Random(0)
        self._gpu: dict[int, int] = {}
        self.killed = 0
        for gpu in range(workers):
            self._start(gpu)

    def _start(self, gpu: int) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with self._log.open("ab", buffering=0) as log:
                    for event in worked(self._db, gpu, *self._work):
                        if isinstance(event, TrialDone) and self._is_first():
                            os.kill(os.getpid(), signal.SIGKILL)
                        if isinstance(event, UnitDone):
                            log.write(f"{event.unit.key}\n".encode())
                code = 0
            finally:
                os._exit(code)
        self._gpu[child] = gpu

    def _is_first(self) -> bool:
        """Whether no process asked before."""
        try:
            self._log.with_suffix(".first").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def kill_one(self) -> None:
        """SIGKILL to one of them."""
        child = self._random.choice(sorted(self._gpu))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self._replace(child)

    def _replace(self, child: int) -> None:
        """The next is on the GPU of one that was killed, or on one more."""
        gpu = self._gpu.pop(child)
        self.killed += 1
        self._start(gpu if self.killed % 2 else gpu + self._workers)

    def has_ended(self) -> bool:
        """Whether all have ended. Raises ChildProcessError for one that failed."""
        for child in list(self._gpu):
            pid, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else 0
            if code == -signal.SIGKILL:
                self._replace(child)
            elif pid:
                del self._gpu[child]
                if code:
                    raise ChildProcessError(f"a worker ended with {code}")
        return not self._gpu

    def close(self) -> None:
        """End those that are left."""
        for child in self._gpu:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._gpu.clear()


@dataclass(frozen=True)
class Survived:
    """What a queue is like after its workers were killed."""

    states: Counter[UnitState]
    finished: tuple[str, ...]
    """Keys of units in the order in which workers said that they had done them."""
    killed: int
    attempts: int
    """Of all units."""
    seconds: float
    table: str
    table_of_one: str
    """What one worker makes of the same units, alone and in another database."""


def chaos(
    db: str,
    folder: Path,
    plan: Plan,
    *,
    workers: int = 8,
    kills: int = 16,
    do: Do | None = None,
    in_the_middle: Callable[[], None] = lambda: None,
    longest_s: float = 1800.0,
    time_budget_s: float = math.inf,
) -> Survived:
    """Work a queue off while workers are killed; ``in_the_middle`` is called once. Raises TimeoutError.

    ``time_budget_s``: of each worker, see :func:`worked`.
    """
    with Store.open(db, create=True) as store:
        sweep = queue(store, plan)
    count, is_past, begun = len(plan.problems), False, time.monotonic()
    crew = Crew(db, log := folder / "done.log", workers, do, time_budget_s)
    around = contextlib.ExitStack()
    try:
        watching = around.enter_context(Store.open(db, writable=False))  # after the workers, which would inherit it
        while not crew.has_ended():
            time.sleep(0.1)
            if time.monotonic() - begun > longest_s:
                raise TimeoutError(f"the queue was not worked off in {longest_s:g} s")
            done = watching.count_units(DEVICE)[UnitState.DONE]
            if crew.killed < kills and done > count * crew.killed / (kills + 2):
                crew.kill_one()
            if not is_past and done > count / 3:
                is_past = True
                in_the_middle()
    finally:
        crew.close()
        around.close()
    seconds = time.monotonic() - begun
    with Store.open(db, writable=False) as store:
        found = store.queue([sweep.key])
    with Store.open(alone := str(folder / "alone.db"), create=True) as store:
        queue(store, plan)
    for _ in worked(alone, 0, do, time_budget_s=time_budget_s):
        pass
    attempts = sum(of.attempts for of in found.units)
    return Survived(
        found.counts, tuple(log.read_text().split()), crew.killed, attempts, seconds, table(db), table(alone)
    )


# Units a second


def throughput(
    db: str, workers: int, *, units_each: int, unit_s: float = 1.0, time_budget_s: float = math.inf
) -> float:
    """Units a second of so many workers at units that sleep.

    Workers are threads, for they only wait. Counted is from when each of them has done a unit, in which it reads the
    plan, until the first of them finds nothing left.
    """
    with Store.open(db, create=True) as store:
        sweep = queue(store, plan_of(workers * (2 + units_each)))

    def sleeping(store: Store, plan: Plan) -> Iterator[Event]:
        time.sleep(unit_s)
        yield from ()

    done: list[list[float]] = [[] for _ in range(workers)]

    def run(gpu: int) -> None:
        events = worked(db, gpu, sleeping, store_units.LEASE_S, time_budget_s)
        done[gpu] += [time.monotonic() for event in events if isinstance(event, UnitDone)]

    threads = [threading.Thread(target=run, args=(gpu,)) for gpu in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store.open(db) as store:
        store.forget_units(sweep.key)
    begun, ended = max(of[0] for of in done), min(of[-1] for of in done)
    return sum(_within(of, begun, ended) for of in done) / (ended - begun)


def _within(moments: Sequence[float], begun: float, ended: float) -> float:
    """How many of one worker's units lie between two moments, parts of units counted."""
    pairs = itertools.pairwise(moments)
    return sum(max(0.0, min(ended, last) - max(begun, first)) / (last - first) for first, last in pairs)


# What the database takes


def statements(db: str, writers: int, seconds: float = 4.0) -> tuple[float, float, float, float]:
    """Units taken and finished a second, leases renewed a second, and trials stored a second by so many processes: each
    in a commit of its own, and :data:`TOGETHER` in one."""
    plan = plan_of(8)
    with Store.open(db, create=True) as store:
        sweep = units.queued(plan)
        one = next(units.units_of(plan, sweep.key))
        store.add_units(sweep, [replace(one, key=f"unit-{number}", position=number) for number in range(2000)])
        until, taken = time.monotonic() + seconds, 0
        while time.monotonic() < until and (lease := store.take_unit(DEVICE, "one")) is not None:
            store.finish_unit(lease)
            taken += 1
        lease = store.take_unit(DEVICE, "one")
        until, renewed = time.monotonic() + seconds, 0
        while time.monotonic() < until and lease is not None:
            store.renew_lease(lease)
            renewed += 1
    alone, together = (_trials_stored(db, plan, writers, seconds, count) for count in (1, TOGETHER))
    with Store.open(db) as store:
        store.forget_units(sweep.key)
    return taken / seconds, renewed / seconds, alone / seconds, together / seconds


def _trials_stored(db: str, plan: Plan, writers: int, seconds: float, together: int) -> int:
    """Trials that so many processes store in all."""
    children, count = [], 0
    for writer in range(writers):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, str(_stored(db, plan, writer, seconds, together)).encode())
            os._exit(0)
        os.close(write)
        children.append((child, read))
    for child, read in children:
        count += int(os.read(read, 20) or b"0")
        os.close(read)
        os.waitpid(child, 0)
    return count


def _stored(db: str, plan: Plan, writer: int, seconds: float, together: int) -> int:
    """Trials that one process stores, so many in a commit."""
    backend, of = plan.backend, plan.problems[writer % len(plan.problems)]
    config = next(iter(of.configs))
    outcome = backend.worker().block(of.arm(config), Place())
    with Store.open(db) as store:
        named = {"command": "", "commit": "", "timer": backend.timer, "seed": 0}
        request = f"writer {writer}, {together} together"
        sweep_id = store.begin_sweep(request, backend.device, **named)  # type: ignore[arg-type]
        until, count = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            with store.adding_together(math.inf):
                for _ in range(together):
                    store.add_soon(sweep_id, plan.row(of, config, outcome, Place(round=count), f"writer {writer}"))
                    count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of units a second, or what survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["throughput", "chaos", "statements"])
    parser.add_argument("--db", required=True, help="an empty or missing one; a server's password goes into PGPASSWORD")
    parser.add_argument("--workers", type=int, action="append", help="repeatable (default: 1, 2, 4 and 8; chaos: 8)")
    parser.add_argument("--units", type=int, default=500, help="of chaos")
    parser.add_argument("--finals", action="store_true", help="with finals, for chaos")
    parser.add_argument("--kills", type=int, default=16, help="of chaos")
    parser.add_argument("--restart", help="a command that restarts the database server, run once in the middle")
    given = parser.parse_args(arguments)
    if given.what == "statements":
        print(f"writers  units taken and done/s  renewals/s  trials/s  {TOGETHER} a commit")
        for workers in given.workers or (1, 8):
            print(
                "{:7}  {:22.0f}  {:10.0f}  {:8.0f}  {:11.0f}".format(workers, *statements(given.db, workers)),
                flush=True,
            )
        return 0
    if given.what == "throughput":
        print("workers  units a second  of linear")
        first = 0.0
        for workers in given.workers or (1, 2, 4, 8):
            rate = throughput(given.db, workers, units_each=10)
            first = first or rate / workers
            print(f"{workers:7}  {rate:14.3f}  {100 * rate / workers / first:7.1f} %", flush=True)
        return 0

    def restart() -> None:
        if given.restart:
            subprocess.run(shlex.split(given.restart), check=True)

    with contextlib.ExitStack() as around:
        folder = Path(around.enter_context(tempfile.TemporaryDirectory()))
        plan = plan_of(given.units, quick=not given.finals)
        workers = (given.workers or [8])[0]
        found = chaos(given.db, folder, plan, workers=workers, kills=given.kills, in_the_middle=restart)
    twice = len(found.finished) - len(set(found.finished))
    states = ", ".join(f"{number} {state}" for state, number in found.states.items())
    print(f"{states} in {found.seconds:.0f} s; {found.killed} workers killed, {found.attempts} attempts")
    print(f"finished twice: {twice}; the same table as of one worker: {found.table == found.table_of_one}")
    return int(twice > 0 or found.table != found.table_of_one or set(found.states) != {UnitState.DONE})


if __name__ == "__main__":
    raise SystemExit(main())
