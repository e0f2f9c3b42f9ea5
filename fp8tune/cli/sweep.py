"""``fp8tune sweep``."""

from __future__ import annotations

import math
import shlex
import sys
import time

import typer

from fp8tune.cli import databases
from fp8tune.cli.adapter import command
from fp8tune.options import SweepOptions
from fp8tune.records import Kind, Status
from fp8tune.redaction import command_line
from fp8tune.render.terminal import notice, print_json_line

EPILOG = """
$ fp8tune sweep --kernel colwise --shapes llama4
$ fp8tune sweep --kernel colwise --shapes llama4,K=5120,routing=zipf
$ fp8tune sweep --recording run.json --budget 30m

Kernels with results: fp8tune show. Shape sets: llama4, deepseek-v3, models,
deepseek-moe-16b, rows, grouped-mm, bench-models, starting-line, unseen, tiny.
"""


@command(SweepOptions, epilog=EPILOG)
def sweep(options: SweepOptions) -> None:
    """Check and time every config of a kernel on every size.

    Stores results as they come; run it again to resume. Without a GPU, checks outputs on small sizes with Triton's
    interpreter and times nothing. Exits 1 if a size has no right config.
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
    from fp8tune.sweeping import planning, session
    from fp8tune.sweeping.events import TrialDone
    from fp8tune.sweeping.options import Options

    begun, text, as_json = time.monotonic(), command_line(map(shlex.quote, sys.argv[1:])), options.format == "json"
    plan = planning.planned(Options.of(options, text))
    where: list[str] = []  # printed once nothing is wrong with the options
    db = databases.to_write(options.db, where.append)
    if options.on is not None:
        from fp8tune.cli import sharing

        plan = planning.expanded(plan)
        notice(*where, *plan.notices)
        sharing.share_out(plan, db, begun, options.on)
        return
    progress, ungated = SweepProgress(), 0
    try:
        plan = planning.expanded(plan)
        notice(*where, *plan.notices)
        if (over_s := time.monotonic() - begun - (options.budget_s or math.inf)) > 0:
            notice(f"the budget was over {over_s:.1f} s before the first trial: planning takes longer; give more")
        with Store.open(db, create=True) as store:
            with progress:
                for event in session.run(store, plan, begun=begun):
                    progress.show(event)
                    if isinstance(event, TrialDone):
                        ungated += event.row.outcome.reason == UNGATED
                        if as_json:
                            print_json_line(contracts.trial(event.row))
            found = [] if as_json else session.studies(store, plan)
            tallies = session.tallies(store, plan)
    except (KeyboardInterrupt, Stopped) as stopped:
        stopped.add_note(stopped_line(progress.stored, progress.phase, database.label(db), text))
        raise
    if ungated:
        notice(f"{ungated} blocks include the host's time: their launches wait for the GPU")
    if progress.is_complete and not progress.stored and not as_json:
        notice("every trial of this sweep is in the database; --again measures anew")
    if found:
        print_winners(found, "table")
    elif tallies and plan.backend.kind is Kind.INTERPRETER and not as_json:
        print_tallies(tallies, "table")
    notice(*failure_lines(tallies, db))
    if not as_json:
        notice(*(found_lines(found) if found else ()), f"rows are in {database.label(db)}")
        notice(*next_lines(found, plan.backend.kind, plan.backend.device, text, options.db))
    wrong = sum(tally.counts[Status.WRONG] for tally in tallies)
    if options.strict and wrong:
        notice(f"{wrong} configs are wrong: fp8tune show --failed")
    if (options.strict and wrong) or not all(tally.has_right for tally in tallies):
        raise typer.Exit(1)
