"""``fp8tune calibrate``."""

from __future__ import annotations

import sys
from typing import Annotated

from fp8tune.commands.options import database_to_write
from fp8tune.options import Group, JsonOrTable, Option, TableFormat, WrittenDatabase, examples
from fp8tune.redaction import command_line
from fp8tune.render.terminal import notice


@examples(
    ("Once on each machine, before its first sweep", "fp8tune calibrate"),
)
def calibrate(
    timer: Annotated[
        str | None, Option("--timer", "simulated:SEED calibrates a fake GPU.", "do_bench", group=Group.WHERE)
    ] = None,
    db: WrittenDatabase = None,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """Measure this device's own noise. Takes half a minute.

    How many processes and rounds finals need follows from it. Stored in the database: later sweeps on this device go
    by it.
    """
    from fp8tune.measure.backends.choice import backend_for
    from fp8tune.render.machine import print_calibration
    from fp8tune.render.progress import Display
    from fp8tune.store.results import Store
    from fp8tune.sweep import calibrate as calibrating
    from fp8tune.sweep import planning
    from fp8tune.sweep.picks import keep_current

    db = database_to_write(db)
    backend, notices = backend_for(None, timer)
    notice(*notices)
    planning.make_ready(backend)
    with Store.open(db, create=True) as store, Display() as display:
        for event in calibrating.calibrate(store, backend, command=command_line(sys.argv[1:])):
            if not isinstance(event, calibrating.Calibration):
                display.update("calibrating", event.done, event.total, detail="fresh processes")
        keep_current(store)
    assert isinstance(event, calibrating.Calibration)  # the last one is
    print_calibration(event, str(format))
