"""``fp8tune doctor``."""

from __future__ import annotations

import typer

from fp8tune.cli.adapter import command
from fp8tune.errors import UsageError
from fp8tune.options import DoctorOptions


@command(
    DoctorOptions,
    usage="[KERNEL]",
    epilog="$ fp8tune doctor --configs vllm/model_executor/layers/fused_moe/configs",
)
def doctor(options: DoctorOptions) -> None:
    """Find problems with this machine, a database or tuned files.

    KERNEL: also check on this GPU that its lookup key covers everything that changes which config wins. Exits 1 on an
    error, 3 if a key stays open.
    """
    from fp8tune.check import doctor as checking
    from fp8tune.render.machine import print_findings

    if options.configs is not None:
        raise UsageError("--configs is not available yet")
    if options.kernel is not None:
        _check_key(options, options.kernel)
        return
    findings = checking.diagnose(options.db)
    print_findings(findings, options.format)
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)


def _check_key(options: DoctorOptions, kernel: str) -> None:
    from fp8tune.check import lint as linting
    from fp8tune.render.progress import SweepProgress
    from fp8tune.render.tallies import failure_lines
    from fp8tune.render.terminal import notice
    from fp8tune.render.trust import print_lint
    from fp8tune.sweeping.options import Options

    request = Options(
        kernels=(kernel,),
        shapes=("starting-line",),
        quick=True,
        time_budget_s=600.0 if options.budget_s is None else options.budget_s,
        command=f"fp8tune doctor {kernel}",
    )
    plan = linting.planned(request)
    notice(*plan.sweep.notices, *plan.faults)
    if plan.faults:
        raise typer.Exit(1)
    with linting.opened(options.db) as store, SweepProgress() as progress:
        report = linting.Report((), 0)
        for event in linting.run(store, plan):
            if isinstance(event, linting.Report):
                report = event
            else:
                progress.show(event)
        tallies = linting.tallies(store, plan)
    notice(*failure_lines(tallies, options.db))
    if report.left_out:
        notice(f"{report.left_out} variations left out by the budget")
    print_lint(plan, report, options.format)
    raise typer.Exit(report.exit_code if all(tally.has_right for tally in tallies) else 1)
