"""``fp8tune import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fp8tune.commands.options import database_to_write
from fp8tune.options import Argument, Option, WrittenDatabase
from fp8tune.render.terminal import notice
from fp8tune.text import visible


def import_(
    file: Annotated[Path, Argument("Another fp8tune database, or a CSV of published measurements.")],
    db: WrittenDatabase = None,
    compile: Annotated[bool, Option("--compile", "Also compile all published configs, as export needs them.")] = False,
) -> None:
    """Merge another database (all rows kept), or published rows with their source: all of a file or nothing.

    Export takes a published config of our kernels only if it compiles for its arch: --compile does that, or
    fp8tune sweep --arch ARCH.
    """
    from fp8tune.render.progress import Display, SweepProgress
    from fp8tune.store import importing
    from fp8tune.store.results import Store
    from fp8tune.sweep import published

    loaded = importing.load(file, published.lookup_key)
    with Store.open(database_to_write(db), create=True) as store:
        with Display() as display:
            report = loaded.store(store, lambda done, total: display.update("rows stored", done, total))
        print(f"{visible(str(file))}: {report.added} rows added, {report.already_there} already there")
        if compile:
            # also with nothing new: the kernels may have changed since they were compiled
            with SweepProgress() as shown:
                for event in published.compile_published(store):
                    shown.show(event)
        elif any(row.config is not None for row in loaded.rows):
            notice(f"nothing was compiled: fp8tune import --compile {file} does so, export needs it")
