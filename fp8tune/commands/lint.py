"""``fp8tune lint``."""

from __future__ import annotations

import typer

from fp8tune.sweep.options import LintOptions


def lint(options: LintOptions) -> None:
    """Whether a kernel's lookup key holds all that moves its winner. Needs a GPU.

    Varies every argument that the key leaves out (the exact M, the routing, the seed and others), one at a time, and
    times what the pick of the key loses there. Exit code 1 where fresh processes prove that it is more than the tie
    band, 3 where they leave that unclear.
    """
    from fp8tune.check import lint as linting
    from fp8tune.render import tallies as render_tallies
    from fp8tune.render import terminal as render
    from fp8tune.render import trust as render_trust

    plan = linting.planned(options.sweep)
    for line in (*plan.sweep.notices, *plan.faults):
        render.notice(line)
    if plan.faults:
        raise typer.Exit(1)
    with linting.opened(options.db) as store, render.SweepProgress() as progress:
        report = linting.Report((), 0)
        for event in linting.run(store, plan):
            if isinstance(event, linting.Report):
                report = event
            else:
                progress.show(event)
        tallies = linting.tallies(store, plan)
    for line in render_tallies.failure_lines(tallies, options.db):
        render.notice(line)
    if report.left_out:
        render.notice(f"{report.left_out} variations left out by the time budget")
    render_trust.print_lint(plan, report, str(options.format))
    raise typer.Exit(report.exit_code if all(tally.has_right for tally in tallies) else 1)
