"""``fp8tune doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fp8tune.cli.adapter import command
from fp8tune.errors import UsageError
from fp8tune.options import DoctorOptions

if TYPE_CHECKING:
    from fp8tune.check.configs import TunedFile
    from fp8tune.check.findings import Finding
    from fp8tune.check.keys import VariationResult

BUDGET_S = 600.0

EPILOG = """
$ fp8tune doctor --db results.db
$ fp8tune doctor --configs vllm/model_executor/layers/fused_moe/configs
"""


@command(DoctorOptions, usage="[KERNEL]", epilog=EPILOG)
def doctor(options: DoctorOptions) -> None:
    """Find problems with this machine, a database or tuned files.

    KERNEL: also check on this GPU that its lookup key covers everything that changes which config wins. Exits 1 on an
    error, 3 if a key stays open.
    """
    from fp8tune.check.configs import check_folder
    from fp8tune.check.databases import check_databases
    from fp8tune.check.findings import Level
    from fp8tune.check.keys import KeyVerdict
    from fp8tune.check.machine import check_machine
    from fp8tune.output.doctor import make_report, print_files, print_findings
    from fp8tune.output.tables import print_document

    files: list[TunedFile] = []
    if options.configs is not None:
        if options.kernel is not None or options.db is not None:
            raise UsageError("--configs does not go with KERNEL or --db: leave them out")
        files, findings = check_folder(Path(options.configs))
    else:
        findings = [*check_machine(), *check_databases(options.db)]
    results: list[VariationResult] = []
    if options.kernel is not None and all(finding.level is not Level.ERROR for finding in findings):
        key_findings, results = _check_key(options, options.kernel)
        findings += key_findings
    report = make_report(findings, results, files)
    if options.format == "json":
        print_document(report, [], "json")
    else:
        print_findings(report)
        if report.files:
            print_files(report)
    if any(finding.level is Level.ERROR for finding in findings):
        raise typer.Exit(1)
    if any(result.verdict is KeyVerdict.OPEN for result in results):
        raise typer.Exit(3)


def _check_key(options: DoctorOptions, kernel: str) -> tuple[list[Finding], list[VariationResult]]:
    from fp8tune.check import keys
    from fp8tune.cli import databases
    from fp8tune.output.progress import Display
    from fp8tune.output.tables import notice

    with databases.opened(options.db) as (reader, _):
        plan = keys.planned(reader, kernel)
    notice(*plan.notices)
    results: list[VariationResult] = []
    with Display() as progress:
        for event in keys.run(plan, BUDGET_S if options.budget_s is None else options.budget_s):
            if isinstance(event, float):
                progress.update(f"timing {len(plan.sizes)} variations of {kernel}", event)
            else:
                results = event
    return [*keys.findings(plan, results)], results
