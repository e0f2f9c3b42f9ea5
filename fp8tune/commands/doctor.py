"""``fp8tune doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8tune.options import DATABASE, JsonOrTable, Option, TableFormat, database_option, examples


@examples(
    ("After an installation, or when something looks odd", "fp8tune doctor"),
    ("After kill -9: put the rows of its log back", "fp8tune doctor --repair"),
    ("Are the tables what the committed rows say", "fp8tune doctor --db results.db"),
)
def doctor(
    db: Annotated[
        str | None, database_option(DATABASE, "Look at this database, and at what its rows say of kernels and tables.")
    ] = None,
    repair: Annotated[
        bool,
        Option("--repair", "Take in, or set aside, the log that a killed process left beside the file."),
    ] = False,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """What is wrong with this machine and your database.

    Each finding says what to do about it. Exit code 1: one of them is an error.

    With --db also which tables and kernels its rows are behind of: what whoever keeps results.db has to do.
    """
    from fp8tune.check import doctor as checking
    from fp8tune.check import repair as repairing
    from fp8tune.render.machine import print_findings
    from fp8tune.store import location

    repaired = repairing.repair(location.own() if db is None else db) if repair else []
    findings = [*repaired, *checking.diagnose(db)]
    print_findings(findings, str(format))
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)
