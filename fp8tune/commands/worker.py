"""``fp8tune worker``."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Annotated

import typer

from fp8tune.commands.options import database_to_write
from fp8tune.options import Group, Option, TableFormat, Timer, WrittenDatabase, examples, seconds
from fp8tune.redaction import command_line
from fp8tune.render.terminal import notice, print_json_line


@examples(
    ("On each GPU, after fp8tune sweep --on queue", "fp8tune worker"),
    ("For a queued kernel of your own", "fp8tune worker --kernel my_kernels.py:SPEC"),
    ("In a job that ends after an hour", "fp8tune worker --time-budget 3500"),
    ("A fake GPU", "fp8tune worker --timer simulated:1,gpu=3 --db try.db"),
)
def worker(
    kernels: Annotated[
        tuple[str, ...],
        Option(
            "--kernel",
            "A kernel of yours that queued sweeps may import here, as in the command that queued it; * stands for any "
            "name. Repeatable.",
            placeholder="NAME",
        ),
    ] = (),
    wait: Annotated[
        bool, Option("--wait", "Wait for units that are queued later, until it is stopped.", group=Group.HOW_LONG)
    ] = False,
    time_budget_s: Annotated[
        float | None,
        Option("--time-budget", "Stop after this many seconds.", parse=seconds, group=Group.HOW_LONG),
    ] = None,
    timer: Timer = None,
    db: WrittenDatabase = None,
    format: Annotated[
        TableFormat,
        Option("--format", "table, or json: one object a line, one an event, as they come.", group=Group.OUTPUT),
    ] = TableFormat.TABLE,
) -> None:
    """Do units of queued sweeps on one GPU.

    fp8tune sweep --on queue puts them into the database; the first GPU that CUDA_VISIBLE_DEVICES shows takes one after
    another until none are left.

    Of a queued sweep it imports kernels of fp8tune, and others only if --kernel names them: whoever may write to the
    database must not choose what code runs here. Other units are left to other workers.

    Ctrl-C and SIGTERM give its unit back at once. If it is killed, or its machine is gone, the unit comes back within a
    minute. Put a server's URL into FP8TUNE_DB: others see a command line. Exit code 1: a unit failed here, or no
    config is right on a problem.
    """
    if timer is None:
        from fp8tune.fork_server import start_server

        start_server()  # it imports torch for the processes to come, which takes longer than all else here
    from fp8tune.fleet.worker import QueueEvent, Worker
    from fp8tune.render import contracts
    from fp8tune.render.fleet import WorkerProgress, findings_line
    from fp8tune.stopping import Stopped
    from fp8tune.store import database

    db = database_to_write(db)
    budget_s = math.inf if time_budget_s is None else time_budget_s
    working = Worker(db, timer, wait, budget_s, kernels, command_line(sys.argv[1:]))
    findings = failed = 0
    try:
        with contextlib.closing(working.run()) as events, WorkerProgress(database.label(db)) as progress:
            for event in events:
                progress.show(event)
                if isinstance(event, QueueEvent):
                    findings += event.event == "done" and bool(event.reason)
                    failed += event.event == "failed"
                    if format is TableFormat.JSON:
                        print_json_line(contracts.worker_event(event))
    except (KeyboardInterrupt, Stopped) as stopped:
        stopped.add_note("its unit is given back, and what was measured of it is stored")
        raise
    if findings:
        notice(findings_line(findings))
    if failed or findings:
        raise typer.Exit(1)
