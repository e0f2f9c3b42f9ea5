"""``fp8tune compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fp8tune.cli import databases
from fp8tune.cli.adapter import command
from fp8tune.errors import UsageError
from fp8tune.options import CompareOptions

if TYPE_CHECKING:
    from fp8tune.comparing.verdicts import Comparison

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
    from fp8tune.output import compare as output
    from fp8tune.output import documents, tables

    document = output.make(compared(options))
    tables.notice(*tables.notices(output.notices(document.rows)))
    match options.format:
        case "json":
            documents.print_json(document)
        case "html":
            from fp8tune.report import comparison

            lines = [output.about(document), output.control(document)]
            print(comparison.document(document, output.title(document), lines, [*map(output.size_text, document.rows)]))
        case style:
            output.screen(document, lists_all=options.all).print(style)
    raise typer.Exit(document.exit_code)


def compared(options: CompareOptions) -> Comparison:
    """Compare on the GPU or the simulated clock; without one, or with ``--db``, by recorded results."""
    from fp8tune.comparing import live, recorded
    from fp8tune.comparing.sides import sides
    from fp8tune.comparing.verdicts import Comparison
    from fp8tune.measure.backends.choice import backend_for
    from fp8tune.output.progress import Display
    from fp8tune.output.tables import notice
    from fp8tune.plan import shapes

    if not options.revisions:
        raise UsageError("compare needs two revisions: write main..branch, or main..WORKTREE")
    both = sides(options.revisions, options.kernel)
    backend, notices = backend_for(None, options.timer)
    if options.db is not None or not backend.times:
        if options.db is None:
            notice("No GPU found: comparing recorded results.")
        with databases.opened(options.db) as (store, _):
            return recorded.compare(recorded.stored(store, both), both)
    notice(*notices)
    rows = [row for name in options.shapes for row in shapes.load(name).rows]
    with Display() as display:
        for event in live.compare(both, rows, options.picks, backend):
            if isinstance(event, Comparison):
                return event
            share = event.done / event.total if event.total else 0.0
            display.update(event.text, share, count=f"{event.done} of {event.total}" if event.total else "")
    raise AssertionError("a live comparison ends with its result")
