"""``fp8tune recheck``."""

from __future__ import annotations

import shlex
import sys

import typer

from fp8tune.cli.adapter import command
from fp8tune.options import RecheckOptions
from fp8tune.redaction import command_line

EPILOG = """
$ fp8tune recheck --arch sm_90
$ fp8tune recheck softmax_sm_90.py --recording run.json --budget 5m
"""


@command(RecheckOptions, usage="[TABLE]", epilog=EPILOG)
def recheck(options: RecheckOptions) -> None:
    """Find out whether tuned configs still hold after an upgrade.

    Compares machine code first (no GPU needed), then times configs in use and known rivals. With --budget, sweeps
    sizes whose ranking moved, and confirms the others. TABLE is a file that export wrote; default: the tables in use.
    Exits 1 if a config is beaten.
    """
    from fp8tune.api.running import rechecked
    from fp8tune.output import recheck as screens
    from fp8tune.output.tables import notice, print_document

    document = rechecked(options, command_line(map(shlex.quote, sys.argv[1:])), notice)
    is_for_review = options.format == "markdown" and document.exit_code
    more = [screens.beaten(document)] if is_for_review else []
    print_document(document, [screens.report(document, options), *more], options.format)
    raise typer.Exit(document.exit_code)
