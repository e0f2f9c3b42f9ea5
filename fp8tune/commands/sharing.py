"""``fp8tune sweep --on``: the sweep's work in units, for workers elsewhere."""

from __future__ import annotations

from fp8tune.errors import UsageError
from fp8tune.render.terminal import notice
from fp8tune.store import database
from fp8tune.store.results import Store
from fp8tune.sweep.options import On
from fp8tune.sweep.planning import Plan


def shared_out(plan: Plan, db: str) -> None:
    """Do what ``--on`` says with an expanded plan."""
    match plan.options.on:
        case On.QUEUE:
            queue(plan, db)
        case _:
            raise UsageError("--on ray is not there yet: use --on queue, and start fp8tune worker on each GPU")


def queue(plan: Plan, db: str) -> None:
    """Add the units, and say how to start workers."""
    from fp8tune.fleet import units

    with Store.open(db, create=True) as store:
        added = units.add(store, plan)
    if added.settled:
        notice(f"{added.settled} problems are settled already; --again measures them anew")
    if added.there:
        print(f"all {added.there} units of this sweep are in the queue already, for {added.sweep.device}")
    else:
        print(f"{added.new} units of {added.problems} problems wait for {added.sweep.device}")
    notice(f"the queue is in {database.label(db)}: set FP8TUNE_DB to it, and run fp8tune worker on each GPU")
    notice("fp8tune queue shows how far they are")
