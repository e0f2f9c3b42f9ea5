"""``fp8tune import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8tune.commands.options import DEFAULT_DATABASE, DatabaseOption


def import_(
    file: Annotated[Path, typer.Argument(help="Another fp8tune database, or a CSV of published measurements.")],
    db: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    """Merge another database (all rows kept), or published rows with their source.

    Published configs of our kernels are compiled for their arch, so that export knows whether they would fit.
    """
    from fp8tune.render import terminal as render
    from fp8tune.store import importing
    from fp8tune.store.results import Store
    from fp8tune.sweep import session

    importing.check_importable(file)
    with Store.open(db, create=True) as store:
        report = importing.import_file(store, file, lookup_key=session.lookup_key)
        print(f"{render.visible(str(file))}: {report.added} rows added, {report.already_there} already there")
        for winner in session.disputes(store) if report.added else ():
            where = f"{winner.problem.kernel} {winner.problem.shape} on {winner.device.name}"
            render.notice(f"{where}: finals of two sides disagree, ambiguous until fp8tune sweep --again has run there")
        if file.suffix == ".csv" and not report.of_operations:
            # also with nothing new: the kernels may have changed since they were compiled
            with render.SweepProgress() as progress:
                for event in session.compile_published(store):
                    progress.show(event)
