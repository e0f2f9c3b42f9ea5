"""``fp8tune recheck``."""

from __future__ import annotations

import shlex
import sys

from fp8tune.api.running import rechecked
from fp8tune.options import RecheckOptions
from fp8tune.output import recheck as screens
from fp8tune.output.tables import notice, print_document
from fp8tune.redaction import command_line


def recheck(options: RecheckOptions) -> int:
    """Recheck configs in use. Exit code 1: one of them is beaten."""
    document = rechecked(options, command_line(map(shlex.quote, sys.argv[1:])), notice)
    is_for_review = options.format == "markdown" and document.exit_code
    more = [screens.beaten(document)] if is_for_review else []
    print_document(document, [screens.report(document, options), *more], options.format)
    return document.exit_code
