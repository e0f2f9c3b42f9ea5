"""``fp8tune recheck``."""

from __future__ import annotations

import shlex
import sys
import time

import typer

from fp8tune.cli import databases
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
    from fp8tune.output import recheck as screens
    from fp8tune.output.progress import SweepProgress
    from fp8tune.output.tables import notice, print_document
    from fp8tune.rechecking import targets
    from fp8tune.rechecking.run import Recheck
    from fp8tune.store import location
    from fp8tune.store.results import Store

    begun, text = time.monotonic(), command_line(map(shlex.quote, sys.argv[1:]))
    db = location.to_write(options.db)
    with databases.opened(options.db) as (reader, _):
        plan, chosen = targets.planned(options, reader, text)
    notice(*plan.notices)
    with Store.open(db, create=True) as store:
        work = Recheck(store, plan, chosen, begun=begun)
        with SweepProgress() as progress:
            for event in work.run():
                progress.show(event)
    document = screens.make_report(plan, work.results)
    print_document(document, [screens.report(document, options)], options.format)
    if document.exit_code:
        raise typer.Exit(document.exit_code)
