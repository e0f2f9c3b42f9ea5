"""``fp8tune export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8tune.commands.options import database_to_read
from fp8tune.errors import UsageError
from fp8tune.options import Kernels, Option, ReadDatabase, module_path


def export(
    arch: Annotated[str, Option("--arch", "The GPU arch to export, such as sm_90.")],
    kernels: Kernels = (),
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "Write the module here.",
            "fp8tune_kernels/tables/ARCH.py in a checkout, else the folder of FP8TUNE_TABLES",
            check=module_path,
        ),
    ] = None,
    check: Annotated[bool, Option("--check", "Write nothing; exit 1 if the table is stale.")] = False,
    prune: Annotated[
        bool,
        Option("--prune", "Remove rows of kernels and devices of the database that it does not give."),
    ] = False,
    verbose: Annotated[bool, Option("--verbose", "Every notice, where there are many alike.")] = False,
    db: ReadDatabase = None,
) -> None:
    """Merge the best configs of an arch into the Python module that the kernels read. Needs no GPU.

    In a checkout of fp8tune that is the shipped table; elsewhere it is your own, which lookups read first: in the
    folder that FP8TUNE_TABLES names, or ~/.local/share/fp8tune/tables. Rows of kernels and devices that the database
    does not know stay.

    Prints what the config for any other shape loses where it was chosen and, each shape left out in turn, on shapes
    held out; beside it what the nearest key's row loses there. Kernels with which that is less go by the nearest key;
    what the committed table has them go by stays until the other is proven to lose less. The JSON beside the module has
    both shape by shape.
    """
    from fp8tune.choose import incumbents
    from fp8tune.export import merging, selecting
    from fp8tune.export import table as exporting
    from fp8tune.render import terminal as render
    from fp8tune.render import trust as render_trust
    from fp8tune.store import names
    from fp8tune.store.results import Store

    if kernels and output is None:
        raise UsageError("--kernel makes a table of that kernel alone: say where with --output PATH")
    db = database_to_read(db)
    with Store.open(db, writable=False) as store:
        names.check_arch(arch, store)
        wanted = names.stored_kernels(kernels, store) if kernels else None
        evidence = selecting.evidence_for(store, arch)
    path = output or exporting.destination(arch)
    own = output is None and path != exporting.table_path(arch)
    held = incumbents.INSTALLED if own else incumbents.COMMITTED
    table = exporting.render(evidence, arch, kernels=wanted, incumbents=held)
    if not table.entries and not (check and table.known):
        why = table.notices[0] if table.notices else "run fp8tune sweep, or name another with --db"
        raise UsageError(f"the database has nothing to export for {arch}: {why}")
    existing = merging.existing(path)
    for line in render_trust.export_notices(table.notices, verbose):
        render.notice(line)
    merged = merging.merge(existing, table, prune=prune or check)
    if check:
        stale = exporting.stale(merged.table, path)
        again = f"stale, run fp8tune export --arch {arch}{' --prune' if merged.removed else ''}"
        print(f"{path}: {again if stale else 'up to date'}")
        raise typer.Exit(1 if stale else 0)
    if own:
        exporting.make_folder(path.parent)
    written = "written" if exporting.write(merged.table, path) else "unchanged"
    print(f"{path}: {written}: {render_trust.export_changes(merged)}")
    for line in render_trust.export_losses(merged):
        render.notice(line)
    render_trust.print_robust(table.robust, merged.table.nearest)
