"""``fp8tune recheck``."""

from __future__ import annotations

from fp8tune.api.running import rechecked
from fp8tune.cli.program import this_command
from fp8tune.options import RecheckOptions
from fp8tune.output import recheck as screens
from fp8tune.output.tables import notice, print_document


def recheck(options: RecheckOptions) -> int:
    """Recheck configs in use. Exit code 1: one of them is beaten."""
    document = rechecked(options, this_command(), notice)
    is_for_review = options.format == "markdown" and document.exit_code
    more = [screens.beaten(document)] if is_for_review else []
    print_document(document, [screens.report(document, options), *more], options.format)
    return document.exit_code
