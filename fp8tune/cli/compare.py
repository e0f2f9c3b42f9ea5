"""``fp8tune compare``."""

from __future__ import annotations

from fp8tune.api.running import compared
from fp8tune.options import CompareOptions
from fp8tune.output import compare as output
from fp8tune.output import tables
from fp8tune.report import comparison


def compare(options: CompareOptions) -> int:
    """Compare two revisions. Exit code 1: REGRESSION or WRONG; 3: OPEN."""
    document = output.make(compared(options, tables.notice))
    tables.notice(*tables.notices(output.notices(document.rows)))
    if options.format == "html":
        lines = [output.about(document), *output.unknown(document), output.control(document)]
        print(comparison.document(document, output.title(document), lines, [*map(output.size_text, document.rows)]))
    else:
        tables.print_document(document, [output.screen(document, lists_all=options.all)], options.format)
    return document.exit_code
