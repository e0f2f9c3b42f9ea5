"""``fp8tune doctor``."""

from __future__ import annotations

from pathlib import Path

from fp8tune.check import keys
from fp8tune.check.configs import TunedFile, check_folder
from fp8tune.check.databases import check_databases
from fp8tune.check.findings import Finding, Level
from fp8tune.check.machine import check_machine
from fp8tune.cli import databases
from fp8tune.errors import UsageError
from fp8tune.options import DoctorOptions
from fp8tune.output.doctor import make_report, screens
from fp8tune.output.progress import Display
from fp8tune.output.tables import notice, print_document


def doctor(options: DoctorOptions) -> int:
    """Print what is wrong. Exit code 1: an error; 3: a key stays open."""
    files: list[TunedFile] = []
    if options.configs is None:
        findings = [*check_machine(), *check_databases(options.db)]
    elif options.kernel is not None or options.db is not None:
        raise UsageError("--configs does not go with KERNEL or --db: leave them out")
    else:
        files, findings = check_folder(Path(options.configs))
    results: list[keys.VariationResult] = []
    if options.kernel is not None and all(finding.level is not Level.ERROR for finding in findings):
        key_findings, results = _check_key(options, options.kernel)
        findings += key_findings
    report = make_report(findings, results, files)
    print_document(report, screens(report), options.format)
    if any(finding.level is Level.ERROR for finding in findings):
        return 1
    return 3 if any(result.verdict is keys.KeyVerdict.OPEN for result in results) else 0


def _check_key(options: DoctorOptions, kernel: str) -> tuple[list[Finding], list[keys.VariationResult]]:
    with databases.opened(options.db) as (reader, _):
        plan = keys.planned(reader, kernel)
    notice(*plan.notices)
    results: list[keys.VariationResult] = []
    with Display() as progress:
        for event in keys.run(plan, options.budget_s):
            if isinstance(event, float):
                progress.update(f"timing {len(plan.sizes)} variations of {kernel}", event)
            else:
                results = event
    return [*keys.findings(plan, results)], results
