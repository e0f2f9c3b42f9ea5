"""``fp8tune queue``."""

from __future__ import annotations

from typing import Annotated

from fp8tune.commands.options import database_to_write
from fp8tune.errors import UsageError
from fp8tune.options import JsonOrTable, Option, TableFormat, WrittenDatabase, examples
from fp8tune.render.terminal import notice


@examples(
    ("What is done, running, waiting and failed", "fp8tune queue"),
    ("Every unit, for a program", "fp8tune queue --format json"),
    ("Remove a sweep of older code", "fp8tune queue --forget 3f2b8d0c91a47e65"),
)
def queue(
    forget: Annotated[
        str | None,
        Option(
            "--forget",
            "Remove a queued sweep, by its key, or all of them. Measured rows stay.",
            placeholder="KEY|all",
        ),
    ] = None,
    db: WrittenDatabase = None,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """See how far workers are with queued sweeps.

    The work of fp8tune sweep --on is in units: problems of one kernel for one device name. A unit waits, is run by a
    worker, is done, or has failed with a reason.
    """
    from fp8tune.render.fleet import print_queue
    from fp8tune.store import database
    from fp8tune.store.results import Store

    db = database_to_write(db)
    if forget:
        with Store.open(db) as store:
            keys = [sweep.key for sweep in store.queue().sweeps]
            if forget not in (None, "all", *keys):
                raise UsageError(f"no queued sweep has the key {forget}: fp8tune queue shows those there are")
            notice(f"{store.forget_units(None if forget == 'all' else forget)} units removed; measured rows stay")
    with Store.open(db, writable=False) as store:
        found = store.queue()
    print_queue(found, database.label(db), str(format))
