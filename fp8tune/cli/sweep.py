"""``fp8tune sweep``."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence

from fp8tune.cli import sharing
from fp8tune.measure.timing import UNGATED
from fp8tune.options import SweepOptions
from fp8tune.output import checks, show
from fp8tune.output import sweep as screens
from fp8tune.output.documents import print_json_line
from fp8tune.output.progress import SweepProgress
from fp8tune.output.tables import notice, print_lines
from fp8tune.output.text import counted, db_option
from fp8tune.records import Status
from fp8tune.redaction import command_line
from fp8tune.stats.same_bits import SameBits
from fp8tune.stats.study import Study
from fp8tune.store import database, location
from fp8tune.store.results import Store, Tally
from fp8tune.studies import constrained
from fp8tune.sweeping import events, picks, planning, session
from fp8tune.sweeping.planning import Plan


def sweep(options: SweepOptions) -> int:
    """Run or queue a sweep. Exit code 1: a size has no right config; with ``--strict`` also if any config is wrong."""
    begun, as_json = time.monotonic(), options.format == "json"
    plan = planning.planned(options, command_line(map(shlex.quote, sys.argv[1:])))
    db = location.to_write(options.db)
    plan = planning.expanded(plan)
    notice(*plan.notices)
    if options.on is not None:
        return sharing.share_out(plan, db, begun, options.on)
    if (over_s := time.monotonic() - begun - (options.budget_s or math.inf)) > 0:
        notice(f"the budget ended {over_s:.1f} s before the first result: planning takes longer, give more")
    progress, finished = SweepProgress.of_plan(plan), None
    with screens.stored_note(progress, db), Store.open(db, create=True) as store:
        with progress:
            for event in session.run(store, plan, begun=begun):
                progress.show(event)
                if isinstance(event, events.Started):
                    notice(screens.title(plan, event.configs, database.label(db)))
                    if as_json:
                        print_json_line(screens.SweepStarted.from_event(event))
                elif isinstance(event, events.TrialDone) and as_json:
                    print_json_line(screens.ConfigTimed.from_row(event.row))
                elif isinstance(event, events.Finished):
                    finished = event
        studies, tallies = session.studies(store, plan), session.tallies(store, plan)
        same, lines = constrained(store, studies, options.same_bits) if options.same_bits else ([], [])
    if finished is not None:
        _print_end(plan, finished, studies, tallies, database.label(db), is_stored=not progress.stored)
        notice(*lines)
        _print_same_bits(same, options)
    wrong = sum(tally.counts[Status.WRONG] for tally in tallies)
    return int((options.strict and wrong > 0) or not all(tally.has_right for tally in tallies))


def _print_end(
    plan: Plan,
    finished: events.Finished,
    studies: Sequence[Study],
    tallies: Sequence[Tally],
    db: str,
    *,
    is_stored: bool,
) -> None:
    """Print the result of a sweep: picks, what was only checked, the outcomes of all configs, and what comes next."""
    backend, kernels, options = plan.backend, screens.kernels_of(plan), plan.options
    rows = [show.ListedPick.from_pick(pick) for pick in picks.decided(studies)]
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
    if ungated := sum(outcome.reason == UNGATED for tally in tallies for outcome in tally.outcomes.values()):
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
    print_lines(screens.next_lines(rows, sum(study.choice.needs_more for study in studies), plan))


def _print_same_bits(choices: Sequence[SameBits], options: SweepOptions) -> None:
    documents = list(map(screens.SameBitsDecided.from_choice, choices))
    if options.format == "json":
        for document in documents:
            print_json_line(document)
        return
    for kernel in dict.fromkeys(choice.pick.kernel for choice in documents):
        of_kernel = [choice for choice in documents if choice.pick.kernel == kernel]
        screens.same_bits(of_kernel, options.same_bits or "").print()
