"""``fp8tune doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8tune.options import JsonOrTable, Option, ReadDatabase, TableFormat, examples


@examples(
    ("After an installation, or when something looks odd", "fp8tune doctor"),
    ("After kill -9: put the rows of its log back", "fp8tune doctor --repair"),
)
def doctor(
    db: ReadDatabase = None,
    repair: Annotated[
        bool,
        Option("--repair", "Take in, or set aside, the log that a killed process left beside the file."),
    ] = False,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """What is wrong with this machine, the database or the tables, and what to do about each."""
    from fp8tune.check import doctor as checking
    from fp8tune.check import repair as repairing
    from fp8tune.render.machine import print_findings
    from fp8tune.render.terminal import notice
    from fp8tune.store import location

    found = location.to_read(db, notice)
    path = found.own or found.base or ""
    findings = [*(repairing.repair(path) if repair else ()), *checking.diagnose(path)]
    print_findings(findings, str(format))
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)
