"""``fp8tune sweep``."""

from __future__ import annotations

import math
import shlex
import sys
import time
from dataclasses import replace

import typer

from fp8tune.commands.options import database_to_write
from fp8tune.options import examples
from fp8tune.records import Kind
from fp8tune.redaction import command_line
from fp8tune.render.terminal import notice, print_json_line
from fp8tune.sweep.options import Options


@examples(
    ("Every config of one kernel on the layers of Llama 4", "fp8tune sweep --kernel colwise --shapes llama4"),
    ("As much as five minutes allow; the same command goes on later", "fp8tune sweep --time-budget 300"),
    ("A kernel of your own program", "fp8tune sweep --kernel module:kernel --recording run.json"),
    ("The whole program on a fake GPU", "fp8tune sweep --kernel colwise --shapes tiny --timer simulated:1 --db try.db"),
    ("Compile for a GPU that is not here", "fp8tune sweep --kernel colwise --arch gfx942"),
)
def sweep(options: Options) -> None:
    """Check and time every config of a kernel on every shape.

    Each result is stored as it comes. Run the same command again to continue a sweep that was stopped. Without a
    GPU the same command checks scaled-down shapes on Triton's interpreter and times nothing. Exit code 1: a problem
    is left without any config that is right, and timed if there is a GPU.
    """
    from fp8tune.measure.timing import UNGATED
    from fp8tune.render import contracts
    from fp8tune.render.found import found_lines, next_lines, stopped_line
    from fp8tune.render.progress import SweepProgress
    from fp8tune.render.tallies import failure_lines, print_tallies
    from fp8tune.render.winners import print_winners
    from fp8tune.stopping import Stopped
    from fp8tune.store import database
    from fp8tune.store.results import Store
    from fp8tune.sweep import planning, session
    from fp8tune.sweep.events import TrialDone

    begun, command = time.monotonic(), command_line(map(shlex.quote, sys.argv[1:]))
    plan = planning.planned(replace(options, command=command))
    where: list[str] = []  # said once nothing is wrong with the options
    db = database_to_write(options.db, where.append)
    if options.on is not None:
        from fp8tune.commands import sharing

        plan = planning.expanded(plan)
        notice(*where, *plan.notices)
        sharing.shared_out(plan, db, begun)
        return
    progress, ungated = SweepProgress(), 0
    try:
        plan = planning.expanded(plan)
        notice(*where, *plan.notices)
        if (over_s := time.monotonic() - begun - (options.time_budget_s or math.inf)) > 0:
            notice(f"the time budget was over {over_s:.1f} s before the first trial: planning takes longer; give more")
        with Store.open(db, create=True) as store:
            with progress:
                for event in session.run(store, plan, begun=begun):
                    progress.show(event)
                    if isinstance(event, TrialDone):
                        ungated += event.row.outcome.reason == UNGATED
                        if options.json:
                            print_json_line(contracts.trial(event.row))
            found = [] if options.json else session.studies(store, plan)
            tallies = session.tallies(store, plan)
    except (KeyboardInterrupt, Stopped) as stopped:
        stopped.add_note(stopped_line(progress.stored, progress.phase, database.label(db), command))
        raise
    if ungated:
        notice(f"{ungated} blocks include the host's time: their launches wait for the GPU")
    if progress.is_complete and not progress.stored and not options.json:
        notice("every trial of this sweep is in the database; --again measures anew")
    if found:
        print_winners(found, "table")
    elif tallies and plan.backend.kind is Kind.INTERPRETER and not options.json:
        print_tallies(tallies, "table")
    notice(*failure_lines(tallies, db))
    if not options.json:
        notice(*(found_lines(found) if found else ()), f"rows are in {database.label(db)}")
        notice(*next_lines(found, plan.backend.kind, plan.backend.device, command, options.db))
    if not all(tally.has_right for tally in tallies):
        raise typer.Exit(1)
