"""``fp8tune worker``."""

from __future__ import annotations

import contextlib
import math
import os
import sys

from fp8tune.cli.program import end_note
from fp8tune.fork_server import start_server
from fp8tune.options import WorkerOptions
from fp8tune.redaction import command_line


def worker(options: WorkerOptions) -> int:
    """Take units until none is left. Exit code 1: a unit failed here, or a size has no right config."""
    if not options.status and not os.environ.get("FP8TUNE_TIMER"):
        start_server()  # before these imports, because it imports torch for the processes to come
    from fp8tune.fleet.units import speedups
    from fp8tune.fleet.worker import QueueEvent, Worker
    from fp8tune.output import worker as screens
    from fp8tune.output.documents import print_json_line
    from fp8tune.output.tables import notice, print_document
    from fp8tune.store import database, location
    from fp8tune.store.results import Store

    db = location.to_write(options.db)
    if options.status:
        with Store.open(db, writable=False) as store:
            document = screens.make_status(store.queue(), database.label(db), speedups(store))
        print_document(document, screens.status(document), options.format)
        return 0
    budget_s = math.inf if options.budget_s is None else options.budget_s
    working = Worker(db, None, options.wait, budget_s, options.kernel, command_line(sys.argv[1:]))
    findings, failed, note = 0, 0, "its unit is given back, and what was measured of it is stored"
    progress = screens.WorkerProgress(database.label(db))
    with end_note(lambda: note), contextlib.closing(working.run()) as events, progress:
        for event in events:
            progress.show(event)
            if isinstance(event, QueueEvent):
                findings += event.event == "done" and bool(event.reason)
                failed += event.event == "failed"
                if options.format == "json":
                    print_json_line(screens.WorkerStep.from_records(event))
    if findings:
        notice(screens.findings_line(findings))
    return int(bool(failed or findings))
