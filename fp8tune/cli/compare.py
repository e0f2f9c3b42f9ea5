"""``fp8tune compare``."""

from __future__ import annotations

import typer

from fp8tune.cli.adapter import command
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
    from fp8tune.api.running import compared
    from fp8tune.output import compare as output
    from fp8tune.output import tables

    document = output.make(compared(options, tables.notice))
    tables.notice(*tables.notices(output.notices(document.rows)))
    if options.format == "html":
        from fp8tune.report import comparison

        lines = [output.about(document), output.control(document)]
        print(comparison.document(document, output.title(document), lines, [*map(output.size_text, document.rows)]))
    else:
        tables.print_document(document, [output.screen(document, lists_all=options.all)], options.format)
    raise typer.Exit(document.exit_code)
