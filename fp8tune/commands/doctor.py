"""``fp8tune doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8tune.options import DATABASE, JsonOrTable, TableFormat, database_option, examples


@examples(
    ("After an installation, or when something looks odd", "fp8tune doctor"),
    ("Are the tables what the committed rows say", "fp8tune doctor --db results.db"),
)
def doctor(
    db: Annotated[
        str | None, database_option(DATABASE, "Look at this database, and at what its rows say of kernels and tables.")
    ] = None,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """What is wrong with this machine and your database.

    Each finding says what to do about it. Exit code 1: one of them is an error.

    With --db also which tables and kernels its rows are behind of: what whoever keeps results.db has to do.
    """
    from fp8tune.check import doctor as checking
    from fp8tune.render.machine import print_findings

    findings = checking.diagnose(db)
    print_findings(findings, str(format))
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)
