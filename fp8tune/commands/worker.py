"""``fp8tune worker``."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Annotated

import typer

from fp8tune.commands.options import database_to_write
from fp8tune.errors import MachineError
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
            "A kernel that is not fp8tune's and may be imported, as in the command that queued it. Repeatable.",
            placeholder="NAME",
        ),
    ] = (),
    recordings: Annotated[
        tuple[str, ...],
        Option("--recording", "A recording whose kernels may be imported. Repeatable.", placeholder="FILE"),
    ] = (),
    references: Annotated[
        tuple[str, ...],
        Option("--reference", "A module:function that may be imported. Repeatable.", placeholder="MODULE:FUNCTION"),
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

    Of a queued sweep it imports kernels of fp8tune, and others only if --kernel or --recording names them: whoever may
    write to the database must not choose what code runs here. Other units are left to other workers.

    Ctrl-C and SIGTERM give its unit back at once. If it is killed, or its machine is gone, the unit comes back within a
    minute. Put a server's URL into FP8TUNE_DB: others see a command line. Exit code 1: a unit failed here, or no
    config is right on a problem.
    """
    if timer is None:
        from fp8tune.fork_server import start_server

        start_server()  # it imports torch for the processes to come, which takes longer than all else here
    from fp8tune.fleet import worker as working
    from fp8tune.fleet.events import OwnEvent, WorkerEnded
    from fp8tune.fleet.imports import Imports
    from fp8tune.render import contracts
    from fp8tune.render.fleet import WorkerProgress
    from fp8tune.stopping import Stopped
    from fp8tune.store import database

    db = database_to_write(db)
    budget_s = math.inf if time_budget_s is None else time_budget_s
    imports = Imports.named(kernels, recordings, references)
    options = working.WorkerOptions(db, timer, wait, budget_s, command=command_line(sys.argv[1:]), imports=imports)
    progress = WorkerProgress(database.label(db))
    try:
        with contextlib.closing(working.work(options)) as events, progress:
            for event in events:
                progress.show(event)
                if format is TableFormat.JSON and isinstance(event, OwnEvent):
                    print_json_line(contracts.worker_event(event))
    except (KeyboardInterrupt, Stopped) as stopped:
        stopped.add_note("its unit is given back, and what was measured of it is stored")
        raise
    assert isinstance(event, WorkerEnded)  # the last one is
    notice(*progress.end(event))
    if event.is_in_vain:
        raise MachineError(event.reason)
    if event.failed or event.findings:
        raise typer.Exit(1)
