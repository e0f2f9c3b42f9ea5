"""``fp8tune sweep``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fp8tune.commands.options import (
    DatabaseOption,
    KernelOption,
    RoutingOption,
    ScaleModeOption,
    SeedOption,
    TimeBudgetOption,
    TimerOption,
    database_to_write,
    seconds,
    shapes_option,
)
from fp8tune.errors import UsageError
from fp8tune.redaction import command_line
from fp8tune_kernels.catalog import KERNELS


def sweep(
    kernel: KernelOption = None,
    shapes: Annotated[list[str] | None, shapes_option("llama4")] = None,
    routing: RoutingOption = "jagged",
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", help="Narrow or widen an axis: num_warps=4,8. Repeatable."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="Compile for an arch that is not here: static facts, no timings."),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Compile only, also where --arch is this machine's.")
    ] = False,
    scale_mode: ScaleModeOption = None,
    seed: SeedOption = 0,
    timer: TimerOption = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what already has a row.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try configs again that failed before.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The screen alone; without it finals in fresh processes.")
    ] = False,
    time_budget: TimeBudgetOption = None,
    trial_timeout: Annotated[
        float,
        typer.Option(
            "--trial-timeout", parser=seconds, help="Seconds after which a trial counts as hanging, at least 1."
        ),
    ] = 120.0,
    db: DatabaseOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, one a trial, on stdout.")] = False,
) -> None:
    """Check and time every config of a kernel's grid on every shape; store each result as it comes.

    Run the same command again to continue a sweep that was stopped. Without a GPU the same command checks scaled-down
    shapes on Triton's interpreter and times nothing. Exit code 1: a problem is left without any right config.
    """
    if trial_timeout < 1:
        raise UsageError(f"--trial-timeout {trial_timeout:g} ends trials before they begin: give at least 1 second")
    from fp8tune.records import Kind, Problem
    from fp8tune.render import tallies as render_tallies
    from fp8tune.render import terminal as render
    from fp8tune.render.winners import print_winners
    from fp8tune.store.results import Store
    from fp8tune.sweep import planning, session

    options = planning.Options(
        kernels=tuple(kernel or KERNELS),
        shapes=tuple(shapes or ("llama4",)),
        routing=routing,
        grid=tuple(grid or ()),
        arch=arch,
        static=static,
        scale_mode=scale_mode,
        seed=seed,
        timer=timer,
        again=again,
        retry_failed=retry_failed,
        quick=quick,
        time_budget_s=time_budget,
        trial_timeout_s=trial_timeout,
        command=command_line(sys.argv[1:]),
    )
    plan = planning.planned(options)
    db = database_to_write(db)
    stored = session.is_stored(db, plan)
    if stored and not json:
        render.notice("every trial of this sweep is in the database; --again measures anew")
        with Store.open(db, writable=False) as store:
            winners = session.winners(store, plan.backend, session.finished_problems(store, plan))
            tallies = session.tallies(store, plan)
    else:
        if not stored:
            plan = planning.expanded(plan)
        for line in plan.notices:
            render.notice(line)
        problems: dict[Problem, None] = {}
        with Store.open(db, create=True) as store, render.SweepProgress() as progress:
            for event in session.run(store, plan):
                progress.show(event)
                if (row := session.row_of(event)) is not None:
                    problems[row.problem] = None
                    if json:
                        render.print_json_line(row.as_json())
            winners = [] if json else session.winners(store, plan.backend, problems)
            tallies = session.tallies(store, plan)
    if winners:
        print_winners(winners, "table")
    elif plan.backend.kind is Kind.INTERPRETER and not json:
        render_tallies.print_tallies(tallies, "table")
    for line in render_tallies.failure_lines(tallies, db):
        render.notice(line)
    if not all(tally.has_right for tally in tallies):
        raise typer.Exit(1)
