"""``fp8tune sweep --on``: the sweep's work in units, for workers elsewhere."""

from __future__ import annotations

import math

import typer

from fp8tune.records import Kind
from fp8tune.render.terminal import counted, notice
from fp8tune.store import database
from fp8tune.store.results import Store
from fp8tune.store.units import UnitState
from fp8tune.sweep.options import On
from fp8tune.sweep.planning import Plan


def shared_out(plan: Plan, db: str, begun: float) -> None:
    """Do what ``--on`` says with an expanded plan. ``begun``: when the time budget began, on the monotonic clock."""
    match plan.options.on:
        case On.QUEUE:
            queue(plan, db)
        case On.RAY:
            on_ray(plan, db, begun)


def queue(plan: Plan, db: str) -> None:
    """Add the units, and say how to start workers."""
    from fp8tune.fleet import units
    from fp8tune.fleet.imports import Imports
    from fp8tune.render.fleet import added_lines

    with Store.open(db, create=True) as store:
        added = units.add(store, plan)
    notice(*added_lines(added))
    if added.there:
        print(f"in the queue already: {counted(added.there, 'unit')} for {added.sweep.device}")
    else:
        print(f"queued for {added.sweep.device}: {counted(added.new, 'unit')} of {counted(added.problems, 'problem')}")
    worker = f"fp8tune worker{Imports().options_for(plan.options.kernels)}"
    notice(f"the queue is in {database.label(db)}: set FP8TUNE_DB to it, and run {worker} on each GPU")
    notice("fp8tune queue shows how far they are")


def on_ray(plan: Plan, db: str, begun: float) -> None:
    """Add the units, and do them on all GPUs that Ray has.

    Exit code 1: a unit failed for good, or no config is right on a problem.
    """
    from fp8tune.fleet import ahead, run, units
    from fp8tune.fleet.on_ray import RayFleet
    from fp8tune.render.fleet import RayProgress, added_lines, findings_line, left_line
    from fp8tune.stopping import Stopped
    from fp8tune.sweep import picks

    deadline = begun + (math.inf if plan.options.time_budget_s is None else plan.options.time_budget_s)
    progress, display = None, RayProgress()
    with Store.open(db, create=True) as store:
        options = plan.options
        fleet = RayFleet(db, store, options.timer, deadline, options.command, kernels=options.kernels, say=display.line)
        try:
            with fleet:
                added = units.add(store, plan)
                notice(*added_lines(added))
                found = counted(added.new + added.there, "unit"), counted(added.problems, "problem")
                notice(f"{' of '.join(found)} on {counted(len(fleet.slots), 'GPU')}")
                if plan.backend.kind is Kind.MEASURED:
                    fleet.compile_ahead(ahead.task_of(store, plan, added.sweep, len(fleet.slots)))
                with display:
                    for progress in run.watch(store, [added.sweep.key], is_over=fleet.is_over):
                        display.tell(progress, fleet.states)
        except (KeyboardInterrupt, Stopped) as stopped:
            stopped.add_note("every unit that was not done waits again; the same command goes on")
            raise
        picks.keep_current(store)
    assert progress is not None  # there is one look at least
    if line := left_line(progress, len(fleet.slots)):
        notice(f"{line}; run it again to go on")
    notice(f"rows are in {database.label(db)}")
    if findings := sum(of.is_finding for of in progress.queue.units):
        notice(findings_line(findings))
    if findings or progress.counts[UnitState.FAILED]:
        raise typer.Exit(1)
