"""``fp8tune sweep``."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from fp8tune.cli.program import end_note, this_command
from fp8tune.measure.timing import UNGATED
from fp8tune.options import SweepOptions
from fp8tune.output import checks, show
from fp8tune.output import sweep as screens
from fp8tune.output.documents import print_json_line
from fp8tune.output.progress import SweepProgress
from fp8tune.output.tables import notice, print_lines
from fp8tune.output.text import command, counted
from fp8tune.records import Status
from fp8tune.stats.means import group_by
from fp8tune.stats.study import Verdict
from fp8tune.store import database, location
from fp8tune.store.results import Store, Tally
from fp8tune.studies import constrained
from fp8tune.sweeping import children, events, on_ray, picks, planning, session
from fp8tune.sweeping.planning import Plan


def sweep(options: SweepOptions) -> int:
    """Run or queue a sweep. Exit code 1: a size has no right config; with ``--strict`` also if any config is wrong."""
    begun, as_json = time.monotonic(), options.format == "json"
    plan = planning.planned(options, this_command())
    db = location.to_write(options.db)
    plan = planning.expanded(plan)
    notice(*plan.notices)
    if (over_s := time.monotonic() - begun - (options.budget_s or math.inf)) > 0:
        notice(f"the budget ended {over_s:.1f} s before the first result: planning takes longer, give more")
    progress, finished = SweepProgress.of_plan(plan), events.Finished(0.0)
    with end_note(lambda: progress.stored_note(database.label(db))), Store.open(db, create=True) as store:
        run = children.run(store, plan, begun=begun) if options.on is None else on_ray.run(store, plan, begun=begun)
        with contextlib.closing(run) as running, progress:  # type: ignore[type-var]
            for event in running:
                progress.show(event)
                if isinstance(event, events.Started):
                    notice(screens.title(plan, event.configs, database.label(db)))
                    if as_json:
                        print_json_line(screens.SweepStarted.from_records(event))
                elif isinstance(event, events.TrialDone) and as_json:
                    print_json_line(screens.ConfigTimed.from_records(event.row))
                elif isinstance(event, events.Finished):
                    finished = event
        studies, tallies = session.studies(store, plan), session.tallies(store, plan)
        same, lines = constrained(store, studies, options.same_bits) if options.same_bits else ([], [])
    choices = list(map(screens.SameBitsDecided.from_choice, same))
    statuses = sum((tally.counts for tally in tallies), Counter[Status]())
    rows = [show.ListedPick.from_pick(pick) for pick in picks.decided(studies)]
    if as_json:
        decided = [screens.SizeDecided(pick=row) for row in rows]
        end = screens.SweepFinished.from_event(finished, rows, statuses, plan.backend.kind)
        for document in (*decided, end, *choices):
            print_json_line(document)
        notice(*checks.agreement_lines(tallies), *checks.failure_lines(tallies), *lines)
    else:
        _print_result(plan, rows, tallies, database.label(db))
        print_lines([checks.counts_line(tallies, plan.backend.kind, finished.seconds)])
        print_lines(checks.agreement_lines(tallies))
        notice(*_notices(plan, finished, tallies, is_stored=not progress.stored))
        print_lines(screens.next_lines(rows, sum(study.choice.needs_more for study in studies), plan))
        notice(*lines)
        for of_kernel in group_by(choices, lambda choice: choice.pick.kernel).values():
            screens.same_bits(of_kernel, options.same_bits or "").print()
    return int((options.strict and statuses[Status.WRONG] > 0) or not all(tally.has_right for tally in tallies))


def _print_result(plan: Plan, rows: Sequence[show.ListedPick], tallies: Sequence[Tally], db: str) -> None:
    """Print the picks, the largest gains first, or what was only checked or compiled."""
    wrong = [show.Place.from_records(tally.subject) for tally in tallies if not tally.has_right]
    if rows and len(screens.kernels_of(plan)) == 1:
        in_use, alone = sum(row.in_use for row in rows), sum(row.verdict == Verdict.ALONE for row in rows)
        largest = show.make_pick_list(rows, wrong, rows[0].gpu, "speedup", screens.ROWS)
        rest = f", {alone} with one config" if alone else ""
        largest.screen(note=f": {len(rows) - in_use - alone} changed, {in_use} in use{rest}").print()
        if (more := len(rows) - screens.ROWS) > 0:
            print_lines([f"({counted(more, 'more size')}: {command('show', rows[0].kernel, db=plan.options.db)})"])
    elif rows:
        show.make_overview(rows, wrong, db).screen().print()
    elif tallies:
        checks.checked_kernels(checks.make_check_list(tallies)).print()


def _notices(plan: Plan, finished: events.Finished, tallies: Sequence[Tally], *, is_stored: bool) -> Iterator[str]:
    """Yield what may surprise about the result. ``is_stored``: nothing was measured anew."""
    if ungated := sum(UNGATED in outcome.reason for tally in tallies for outcome in tally.outcomes.values()):
        yield f"{ungated} configs include the host's time: their launches wait for the GPU"
    if finished.left_out:
        yield f"the budget left out {finished.left_out:,} blocks: run the same command to resume"
    elif finished.grid:
        yield screens.search_line(finished.seen, finished.grid)
    elif is_stored:
        yield "all results of this sweep were in the database: --again measures them anew"
    states, step = checks.states(tallies), command("show", screens.kernels_of(plan)[0], "--failed", db=plan.options.db)
    if states["wrong"]:
        yield f"{counted(states['wrong'], 'config')} gave a wrong output: {step}"
    if states["disagree"]:
        yield f"{counted(states['disagree'], 'config')} gave another output than the first: {step}"
    yield from checks.failure_lines(tallies)
