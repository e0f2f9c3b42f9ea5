"""``fp8tune static-report``."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8tune.commands.options import ArchOption, KernelOption, ReadDatabaseOption, TableFormat, database_to_read


def static_report(
    kernel: KernelOption = None,
    arch: ArchOption = None,
    db: ReadDatabaseOption = None,
    format: Annotated[TableFormat, typer.Option("--format", help="table or json.")] = TableFormat.TABLE,
) -> None:
    """How far rows that were only compiled can be trusted; with --arch, how they rank its configs. Needs no GPU.

    The ranking is measured against times where both are stored. Filled by fp8tune sweep --static --arch ARCH.
    """
    from fp8tune.choose import ranking, static_score
    from fp8tune.render import evidence as render_evidence
    from fp8tune.render import terminal as render
    from fp8tune.store import names
    from fp8tune.store.results import Store

    db = database_to_read(db)
    with Store.open(db, writable=False) as store:
        wanted = names.stored_kernels(kernel, store)
        if arch is not None:
            names.check_arch(arch, store)
        evidence = store.evidence(arch=arch or static_score.CALIBRATED_ON, keep=ranking.competing)
    found = [item for item in evidence if item.problem.kernel in wanted]
    if arch is not None:
        render_evidence.print_rankings(static_score.rankings(found), arch, str(format))
        return
    calibrations = static_score.calibrations(found)
    if not calibrations:
        command = f"fp8tune sweep --static --arch {static_score.CALIBRATED_ON}"
        render.notice(f"no kernel has both static and measured rows in {db}: run {command}")
    render_evidence.print_calibrations([calibrations[name] for name in wanted if name in calibrations], str(format))
