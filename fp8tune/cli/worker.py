"""``fp8tune worker``."""

from __future__ import annotations

import contextlib
import math
import os
import sys

import typer

from fp8tune.cli.adapter import command
from fp8tune.options import WorkerOptions
from fp8tune.redaction import command_line


@command(WorkerOptions, epilog="$ fp8tune worker --kernel 'my_ops:*'\n$ fp8tune worker --status")
def worker(options: WorkerOptions) -> None:
    """Work on queued sweeps with this GPU, or show their status.

    Stops when no work is left. Unfinished work goes back to the queue, at once after Ctrl-C or SIGTERM, within a minute
    after kill -9.
    """
    if not options.status:
        _work(options)
        return
    from fp8tune.fleet.units import speedups
    from fp8tune.output import worker as screens
    from fp8tune.output.tables import print_document
    from fp8tune.store import database, location
    from fp8tune.store.results import Store

    db = location.to_write(options.db)
    with Store.open(db, writable=False) as store:
        document = screens.make_status(store.queue(), database.label(db), speedups(store))
    print_document(document, screens.status(document), options.format)


def _work(options: WorkerOptions) -> None:
    """Take units until none is left. Exit code 1: a unit failed here, or a size has no right config."""
    if not os.environ.get("FP8TUNE_TIMER"):
        from fp8tune.fork_server import start_server

        start_server()  # it imports torch for the processes to come, which takes longer than all else here
    from fp8tune.fleet.worker import QueueEvent, Worker
    from fp8tune.output.documents import print_json_line
    from fp8tune.output.tables import notice
    from fp8tune.output.worker import WorkerProgress, WorkerStep, findings_line
    from fp8tune.stopping import Stopped
    from fp8tune.store import database, location

    db = location.to_write(options.db)
    budget_s = math.inf if options.budget_s is None else options.budget_s
    working = Worker(db, None, options.wait, budget_s, options.kernel, command_line(sys.argv[1:]))
    findings = failed = 0
    try:
        with contextlib.closing(working.run()) as events, WorkerProgress(database.label(db)) as progress:
            for event in events:
                progress.show(event)
                if isinstance(event, QueueEvent):
                    findings += event.event == "done" and bool(event.reason)
                    failed += event.event == "failed"
                    if options.format == "json":
                        print_json_line(WorkerStep.from_event(event))
    except (KeyboardInterrupt, Stopped) as stopped:
        stopped.add_note("its unit is given back, and what was measured of it is stored")
        raise
    if findings:
        notice(findings_line(findings))
    if failed or findings:
        raise typer.Exit(1)
