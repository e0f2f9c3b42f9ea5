"""``fp8tune sweep``."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from fp8tune.cli.adapter import command
from fp8tune.options import SweepOptions
from fp8tune.redaction import command_line

if TYPE_CHECKING:
    from fp8tune.output.sweep import SameBitsDecided
    from fp8tune.stats.study import Study
    from fp8tune.store.results import Tally
    from fp8tune.sweeping.events import Finished
    from fp8tune.sweeping.planning import Plan

EPILOG = """
$ fp8tune sweep --kernel colwise --shapes llama4
$ fp8tune sweep --kernel colwise --shapes llama4,K=5120,routing=zipf
$ fp8tune sweep --recording run.json --budget 30m

Kernels with results: fp8tune show. Shape sets: llama4, deepseek-v3, models,
deepseek-moe-16b, rows, grouped-mm, bench-models, moe-layer-up,
moe-layer-down, starting-line, unseen, tiny.
"""


@command(SweepOptions, epilog=EPILOG)
def sweep(options: SweepOptions) -> None:
    """Check and time every config of a kernel on every size.

    Stores results as they come; run it again to resume. Without a GPU, checks outputs on small sizes with Triton's
    interpreter and times nothing. Exits 1 if a size has no right config.
    """
    from fp8tune.output import sweep as screens
    from fp8tune.output.documents import print_json_line
    from fp8tune.output.progress import SweepProgress
    from fp8tune.output.tables import notice
    from fp8tune.records import Status
    from fp8tune.stopping import Stopped
    from fp8tune.store import database, location
    from fp8tune.store.results import Store
    from fp8tune.studies import constrained
    from fp8tune.sweeping import events, planning, session

    begun, text, as_json = time.monotonic(), command_line(map(shlex.quote, sys.argv[1:])), options.format == "json"
    plan = planning.planned(options, text)
    db = location.to_write(options.db)
    plan = planning.expanded(plan)
    notice(*plan.notices)
    if options.on is not None:
        from fp8tune.cli import sharing

        sharing.share_out(plan, db, begun, options.on)
        return
    today = {size.problem: size.today.config for size in plan.problems if size.today}
    progress, finished = SweepProgress(today), None
    try:
        if (over_s := time.monotonic() - begun - (options.budget_s or math.inf)) > 0:
            notice(f"the budget ended {over_s:.1f} s before the first result: planning takes longer, give more")
        with Store.open(db, create=True) as store:
            with progress:
                for event in session.run(store, plan, begun=begun):
                    progress.show(event)
                    if isinstance(event, events.Started):
                        notice(screens.title(plan, event.configs, database.label(db)))
                    if as_json and isinstance(event, events.Started):
                        print_json_line(screens.SweepStarted.from_event(event))
                    elif as_json and isinstance(event, events.TrialDone):
                        print_json_line(screens.ConfigTimed.from_row(event.row))
                    elif isinstance(event, events.Finished):
                        finished = event
            studies, tallies = session.studies(store, plan), session.tallies(store, plan)
            same, lines = constrained(store, studies, options.same_bits) if options.same_bits else ([], [])
    except (KeyboardInterrupt, Stopped) as stopped:
        stopped.add_note(screens.stopped_line(progress.stored, progress.phase, database.label(db)))
        raise
    if finished is not None:
        _print_end(options, plan, finished, studies, tallies, database.label(db), is_stored=not progress.stored)
        notice(*lines)
        _print_same_bits([screens.SameBitsDecided.from_choice(choice) for choice in same], options)
    wrong = sum(tally.counts[Status.WRONG] for tally in tallies)
    if (options.strict and wrong) or not all(tally.has_right for tally in tallies):
        raise typer.Exit(1)


def _print_same_bits(choices: Sequence[SameBitsDecided], options: SweepOptions) -> None:
    from fp8tune.output.documents import print_json_line
    from fp8tune.output.sweep import same_bits

    for kernel in dict.fromkeys(choice.pick.kernel for choice in choices):
        of_kernel = [choice for choice in choices if choice.pick.kernel == kernel]
        if options.format == "table":
            same_bits(of_kernel, options.same_bits or "").print()
            continue
        for choice in of_kernel:
            print_json_line(choice)


def _print_end(
    options: SweepOptions,
    plan: Plan,
    finished: Finished,
    studies: Sequence[Study],
    tallies: Sequence[Tally],
    db: str,
    *,
    is_stored: bool,
) -> None:
    from fp8tune.measure.timing import UNGATED
    from fp8tune.output import checks, show
    from fp8tune.output import sweep as screens
    from fp8tune.output.documents import print_json_line
    from fp8tune.output.tables import notice, print_lines
    from fp8tune.output.text import counted, db_option
    from fp8tune.records import Status
    from fp8tune.sweeping import picks

    backend = plan.backend
    rows = [show.ListedPick.from_pick(pick) for pick in picks.decided(studies)]
    kernels = screens.kernels_of(plan)
    statuses = sum((tally.counts for tally in tallies), Counter[Status]())
    without = Counter(tally.subject.problem.kernel for tally in tallies if not tally.has_right)
    if options.format == "json":
        for row in rows:
            print_json_line(screens.SizeDecided(pick=row))
        print_json_line(screens.SweepFinished.from_event(finished, rows, statuses))
        notice(*checks.failure_lines(tallies))
        return
    if rows and len(kernels) == 1:
        screens.result(rows, without.total()).print()
    elif rows:
        gpu = backend.device.name or backend.device.arch
        places = {(kernel, gpu): count for kernel, count in without.items()}
        show.overview(show.make_overview(rows, places, db, [])).print()
    elif tallies:
        checks.checked_kernels(checks.make_check_list(tallies)).print()
    print_lines([checks.counts_line(statuses, backend.kind, finished.seconds)])
    ungated = sum(outcome.reason == UNGATED for tally in tallies for outcome in tally.outcomes.values())
    if ungated:
        notice(f"{ungated} configs include the host's time: their launches wait for the GPU")
    if finished.left_out:
        notice(f"the budget left out {finished.left_out:,} blocks: run the same command to resume")
    elif finished.grid:
        notice(screens.search_line(finished.seen, finished.grid))
    elif is_stored:
        notice("all results of this sweep were in the database: --again measures them anew")
    if wrong := statuses[Status.WRONG]:
        command = f"fp8tune show {shlex.quote(kernels[0])} --failed{db_option(options.db)}"
        notice(f"{counted(wrong, 'config')} gave a wrong output: {command}")
    notice(*checks.failure_lines(tallies))
    unsettled = sum(study.choice.needs_more for study in studies)
    print_lines(screens.next_lines(rows, unsettled, plan, options.db))
