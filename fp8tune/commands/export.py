"""``fp8tune export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8tune.commands.options import DEFAULT_DATABASE, DatabaseOption, KernelOption, module_path
from fp8tune.errors import UsageError


def export(
    arch: Annotated[str, typer.Option("--arch", help="The GPU arch to export, such as sm_90.")],
    kernel: KernelOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            callback=module_path,
            help="Write the module here.",
            show_default="fp8tune_kernels/tables/ARCH.py",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if the table is stale.")] = False,
    db: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Write the best configs of an arch as the Python module that the kernels import. Needs no GPU.

    Prints what the config for any other shape loses where it was chosen and, each shape left out in turn, on shapes
    held out; beside it what the nearest key's row loses there. Kernels with which that is less go by the nearest key;
    what the committed table has them go by stays until the other is proven to lose less. The JSON beside the module has
    both shape by shape.
    """
    from fp8tune.choose import incumbents
    from fp8tune.export import selecting
    from fp8tune.export import table as exporting
    from fp8tune.render import terminal as render
    from fp8tune.render import trust as render_trust
    from fp8tune.store import names
    from fp8tune.store.results import Store

    if kernel and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: say where with --output PATH")
    with Store.open(db, writable=False) as store:
        names.check_arch(arch, store)
        wanted = names.stored_kernels(kernel, store) if kernel else None
        evidence = selecting.evidence_for(store, arch)
    table = exporting.render(evidence, arch, kernels=wanted, incumbents=incumbents.COMMITTED)
    path = output or exporting.table_path(arch)
    for line in table.notices:
        render.notice(line)
    if check:
        stale = exporting.stale(table, path)
        print(f"{path}: {'stale, run fp8tune export --arch ' + arch if stale else 'up to date'}")
        raise typer.Exit(1 if stale else 0)
    print(f"{path}: {'written' if exporting.write(table, path) else 'unchanged'}")
    render_trust.print_robust(table.robust, table.nearest)
