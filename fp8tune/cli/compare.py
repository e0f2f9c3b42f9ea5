"""``fp8tune compare``."""

from __future__ import annotations

import typer

from fp8tune.cli import databases
from fp8tune.cli.adapter import command
from fp8tune.errors import UsageError
from fp8tune.options import CompareOptions

EPILOG = """
$ fp8tune compare main..branch
$ fp8tune compare main...branch --format markdown > comment.md
"""


@command(CompareOptions, usage="A..B", epilog=EPILOG)
def compare(options: CompareOptions) -> None:
    """Judge whether a change made kernels slower, faster or wrong.

    A and B are revisions, or WORKTREE; A...B starts at their merge base. A GPU times both in turns. Without one, or
    with --db, recorded results are compared. A..A shows the noise. Exits 1 on REGRESSION or WRONG, 3 on OPEN.
    """
    from pathlib import Path

    from fp8tune.comparing import live, recorded
    from fp8tune.comparing import options as parsed
    from fp8tune.comparing.comparison import Comparison
    from fp8tune.comparing.sides import sides
    from fp8tune.measure.backends.choice import backend_for
    from fp8tune.render import compare as render_compare
    from fp8tune.render import terminal as render

    if not options.revisions:
        raise UsageError("compare needs two revisions: write main..branch, or main..WORKTREE")
    backend, notices = backend_for(None, options.timer)
    if options.db is not None or not backend.times:
        with databases.opened(options.db) as (store, _):
            both = sides(Path(), options.revisions, options.kernel)
            comparison = recorded.compare(recorded.stored(store, both), both)
        if options.db is None:
            render.notice("no GPU here: recorded results are compared")
    else:
        for line in notices:
            render.notice(line)
        request = parsed.CompareOptions(
            revisions=options.revisions,
            kernels=options.kernel,
            shapes=options.shapes,
            configs=parsed.Configs(options.picks),
            timer=options.timer,
        )
        with render_compare.CompareProgress() as progress:
            for event in live.compare(request, backend):
                progress.show(event)
        assert isinstance(event, Comparison)  # the last one is
        comparison = event
    for line in comparison.notices:
        render.notice(line)
    render_compare.print_comparison(comparison, options.format)
    raise typer.Exit(comparison.exit_code)
