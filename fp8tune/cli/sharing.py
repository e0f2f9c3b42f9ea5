"""``fp8tune sweep --on``: the sweep's work in units, for workers elsewhere."""

from __future__ import annotations

import time

from fp8tune.cli.program import end_note
from fp8tune.fleet import units
from fp8tune.output.progress import Display
from fp8tune.output.tables import notice
from fp8tune.output.text import counted
from fp8tune.output.worker import findings_line, show_queue
from fp8tune.store import database
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import Queue
from fp8tune.sweeping import picks
from fp8tune.sweeping.planning import Plan

LOOK_S = 1.0  # between looks at the queue


def share_out(plan: Plan, db: str, begun: float, on: str) -> int:
    """Queue the units of an expanded plan, and do them if ``on`` is ``ray``.

    ``begun`` is when the time budget began, on the monotonic clock.
    """
    with Store.open(db, create=True) as store:
        sweep, new = units.add(store, plan)
        queue = store.queue([sweep.key])
    before = "" if new else f", queued before, {queue.counts[UnitState.DONE]:,} done"
    work = f"{counted(len(queue.units), 'unit')} of {counted(len(plan.problems), 'size')}"
    notice(f"{work} for {sweep.device}{before}")
    if on == "ray":
        return on_ray(plan, db, sweep.key, begun)
    worker = f"fp8tune worker{units.worker_options(plan.options.kernel)}"
    notice(f"the queue is in {database.label(db)}: set FP8TUNE_DB to it, and run {worker} on each GPU")
    notice("fp8tune worker --status shows how far they are")
    return 0


def on_ray(plan: Plan, db: str, sweep: str, begun: float) -> int:
    """Do the units of a queued sweep on all GPUs that Ray has.

    Exit code 1: a unit failed for good, or no config is right on a problem size.
    """
    from fp8tune.fleet.on_ray import RayFleet  # Ray is an optional dependency

    options, queue = [f"--kernel={text}" for text in plan.options.kernel if ":" in text or "?" in text], Queue()
    if plan.options.budget_s is not None:
        options.append(f"--budget={max(0.0, begun + plan.options.budget_s - time.monotonic()):.0f}")
    note = "every unit that was not done waits again; run the same command to resume"
    with Store.open(db, create=True) as store:
        with end_note(lambda: note), RayFleet(db, options, plan.options.timer) as fleet, Display() as display:
            is_over = False
            while not is_over:
                is_over = fleet.is_over()
                store.return_expired_units()
                queue = store.queue([sweep])
                show_queue(display, queue)
                is_over |= all(status.state in (UnitState.DONE, UnitState.FAILED) for status in queue.units)
                time.sleep(0 if is_over else LOOK_S)
        picks.keep_current(store)
    notice(*fleet.failures)
    if left := queue.counts[UnitState.WAITING] + queue.counts[UnitState.RUNNING]:
        notice(f"{counted(left, 'unit')} left: run the same command to resume")
    notice(f"results are in {database.label(db)}")
    if findings := sum(status.is_finding for status in queue.units):
        notice(findings_line(findings))
    return int(bool(findings or queue.counts[UnitState.FAILED]))
