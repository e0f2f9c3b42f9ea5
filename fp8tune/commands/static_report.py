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
    """What was compiled for each arch and not run, and the config that suits it best; with --arch each that fits.

    Configs are in the order of choice: by what they lose where they were timed, and what they spill here. Filled by
    fp8tune sweep --static --arch ARCH. Needs no GPU.
    """
    from fp8tune.choose import ranking, untimed
    from fp8tune.records import Kind
    from fp8tune.render import evidence as render_evidence
    from fp8tune.render import terminal as render
    from fp8tune.store import names
    from fp8tune.store.results import Store

    db = database_to_read(db)
    with Store.open(db, writable=False) as store:
        wanted = names.stored_kernels(kernel, store)
        if arch is not None:
            names.check_arch(arch, store)
        static = store.evidence(arch=arch, kinds=[Kind.STATIC])
        measured = store.evidence(arch=untimed.TIMED_ON, kinds=[Kind.MEASURED], keep=ranking.competing)
    found = untimed.compiled(static, untimed.timed(measured))
    rows = [row for name in wanted for row in found if row.kernel == name]
    if arch is not None:
        render_evidence.print_fitting(rows, str(format))
        return
    if not rows:
        render.notice(f"nothing was compiled only in {db}: run fp8tune sweep --static --arch {untimed.TIMED_ON}")
    render_evidence.print_compiled(rows, str(format))
