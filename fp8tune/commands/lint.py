"""``fp8tune lint``."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8tune.options import (
    Argument,
    Group,
    Option,
    Seed,
    Shapes,
    TableFormat,
    Timer,
    database_option,
    examples,
    seconds,
)
from fp8tune.render.terminal import notice


@examples(
    ("Does its key hold all that moves the winner?", "fp8tune lint colwise"),
    ("The same, in less time", "fp8tune lint colwise --grid num_stages=1 --time-budget 300"),
)
def lint(
    kernel: Annotated[str, Argument("A kernel, as for sweep --kernel.")],
    shapes: Shapes = ("starting-line",),
    routing: Annotated[str, Option("--routing", "How rows spread over groups where the pick is made.")] = "jagged",
    grid: Annotated[
        tuple[str, ...], Option("--grid", "Narrow an axis, and so the time it takes: num_stages=1. Repeatable.")
    ] = (),
    seed: Seed = 0,
    timer: Timer = None,
    time_budget_s: Annotated[
        float | None,
        Option("--time-budget", "Screen no new problem after this many seconds; say what was left out.", parse=seconds),
    ] = None,
    db: Annotated[
        str | None, database_option("a temporary one", "Keep the rows there, and continue from them.")
    ] = None,
    format: Annotated[TableFormat, Option("--format", "table or json.", group=Group.OUTPUT)] = TableFormat.TABLE,
) -> None:
    """Whether a kernel's lookup key holds all that moves its winner. Needs a GPU.

    Varies every argument that the key leaves out (the exact M, the routing, the seed and others), one at a time, and
    times what the pick of the key loses there. Exit code 1 where fresh processes prove that it is more than the tie
    band, 3 where they leave that unclear.
    """
    from fp8tune.check import lint as linting
    from fp8tune.render.progress import SweepProgress
    from fp8tune.render.tallies import failure_lines
    from fp8tune.render.trust import print_lint
    from fp8tune.sweep.options import Options

    options = Options(
        kernels=(kernel,),
        shapes=shapes,
        routing=routing,
        grid=grid,
        seed=seed,
        timer=timer,
        quick=True,
        time_budget_s=time_budget_s,
        command=f"fp8tune lint {kernel}",
    )
    plan = linting.planned(options)
    notice(*plan.sweep.notices, *plan.faults)
    if plan.faults:
        raise typer.Exit(1)
    with linting.opened(db) as store, SweepProgress() as progress:
        report = linting.Report((), 0)
        for event in linting.run(store, plan):
            if isinstance(event, linting.Report):
                report = event
            else:
                progress.show(event)
        tallies = linting.tallies(store, plan)
    notice(*failure_lines(tallies, db))
    if report.left_out:
        notice(f"{report.left_out} variations left out by the time budget")
    print_lint(plan, report, format)
    raise typer.Exit(report.exit_code if all(tally.has_right for tally in tallies) else 1)
