"""``fp8tune sweep``."""

from __future__ import annotations

import sys
from dataclasses import replace

import typer

from fp8tune.commands.options import database_to_write
from fp8tune.options import examples
from fp8tune.records import Kind, Problem
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
    is left without any right config.
    """
    from fp8tune.render import contracts
    from fp8tune.render.progress import SweepProgress
    from fp8tune.render.tallies import failure_lines, print_tallies
    from fp8tune.render.winners import print_winners
    from fp8tune.store.results import Store
    from fp8tune.sweep import planning, session

    plan = planning.planned(replace(options, command=command_line(sys.argv[1:])))
    where: list[str] = []  # said once nothing is wrong with the options
    db = database_to_write(options.db, where.append)
    stored = session.is_stored(db, plan)
    if stored and not options.json:
        notice(*where)
        notice("every trial of this sweep is in the database; --again measures anew")
        with Store.open(db, writable=False) as store:
            winners = session.winners(store, plan.backend, session.finished_problems(store, plan))
            tallies = session.tallies(store, plan)
    else:
        if not stored:
            plan = planning.expanded(plan)
        notice(*where, *plan.notices)
        problems: dict[Problem, None] = {}
        with Store.open(db, create=True) as store, SweepProgress() as progress:
            for event in session.run(store, plan):
                progress.show(event)
                if (row := session.row_of(event)) is not None:
                    problems[row.problem] = None
                    if options.json:
                        print_json_line(contracts.trial(row))
            winners = [] if options.json else session.winners(store, plan.backend, problems)
            tallies = session.tallies(store, plan)
    if winners:
        print_winners(winners, "table")
    elif plan.backend.kind is Kind.INTERPRETER and not options.json:
        print_tallies(tallies, "table")
    notice(*failure_lines(tallies, db))
    if not all(tally.has_right for tally in tallies):
        raise typer.Exit(1)
