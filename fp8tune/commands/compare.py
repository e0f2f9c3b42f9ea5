"""``fp8tune compare``."""

from __future__ import annotations

import typer

from fp8tune.commands.options import opened_to_read
from fp8tune.compare.options import CompareOptions
from fp8tune.options import examples


@examples(
    ("A verdict a row for a pull request", "fp8tune compare main..branch --format markdown"),
    ("Without a GPU, from recorded rows", "fp8tune compare main..branch --from-db"),
)
def compare(options: CompareOptions) -> None:
    """Whether a change made kernels slower, faster or wrong: both revisions built, checked and timed in turns.

    Without a GPU, or with --from-db, from recorded rows. Exit code 1: a regression or newly wrong bytes; 3: a row is
    open, or the control arm drifted; 0: neither.
    """
    from fp8tune.compare import live, recorded
    from fp8tune.compare.comparison import Comparison
    from fp8tune.compare.sides import sides
    from fp8tune.measure.backends.choice import backend_for
    from fp8tune.render import compare as render_compare
    from fp8tune.render import terminal as render

    backend, notices = backend_for(None, options.timer)
    if options.from_db or not backend.times:
        with opened_to_read(options.db) as (store, _):
            both = sides(options.repository, options.revisions, options.kernels)
            comparison = recorded.compare(recorded.stored(store, both), both)
        if not options.from_db:
            render.notice("no GPU here: from recorded rows, as with --from-db")
    else:
        for line in notices:
            render.notice(line)
        with render_compare.CompareProgress() as progress:
            for event in live.compare(options, backend):
                progress.show(event)
        assert isinstance(event, Comparison)  # the last one is
        comparison = event
    for line in comparison.notices:
        render.notice(line)
    render_compare.print_comparison(comparison, str(options.format))
    raise typer.Exit(comparison.exit_code)
