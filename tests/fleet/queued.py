"""Queues for the tests of workers: many small problems of one kernel on the simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8tune.fleet import units, worker
from fp8tune.fleet.events import WorkerEvent
from fp8tune.records import NamedInts
from fp8tune.store.results import Store
from fp8tune.store.units import QueuedSweep
from fp8tune.sweep import planning
from fp8tune.sweep.options import Options
from fp8tune.sweep.planning import Plan

DEVICE = "simulated:1"
FEW = ("num_warps=4,8", "BLOCK_SIZE=2", "BLOCK_SIZE_ITER=8192", "num_stages=1")
"""Of rowwise-2d: the default and another config."""


def plan_of(count: int, *, quick: bool = True, again: bool = False, kernels: tuple[str, ...] = ("rowwise-2d",)) -> Plan:
    """A plan of so many problems a kernel."""
    options = Options(kernels=kernels, timer=DEVICE, quick=quick, again=again, grid=FEW, shapes=())
    rows = tuple(NamedInts(M=1024, K=128 * (1 + number), E=1, N=128) for number in range(count))
    return planning.expanded(replace(planning.planned(options), rows=rows))


def queue(store: Store, plan: Plan) -> QueuedSweep:
    """Queue a plan with a unit a problem."""
    sweep = units.queued(plan)
    one = (replace(plan, problems=(of,)) for of in plan.problems)
    store.add_units(sweep, [unit for each in one for unit in units.units_of(each, sweep.key)])
    return sweep


def worked(db: str, gpu: int = 0, **options: object) -> Iterator[WorkerEvent]:
    """The events of a worker on one of the made-up GPUs, whose units come back two seconds after it died."""
    given = {"db": db, "timer": f"{DEVICE},gpu={gpu}", "lease_s": 2.0, **options}
    return worker.work(worker.WorkerOptions(**given))  # type: ignore[arg-type]
