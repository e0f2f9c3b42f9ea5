"""``fp8tune compact``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fp8tune.commands.options import database_to_write
from fp8tune.errors import UsageError
from fp8tune.options import Group, JsonOrTable, Option, TableFormat, WrittenDatabase, examples
from fp8tune.render.terminal import print_json
from fp8tune.text import visible


@examples(
    ("Make a database small, in place", "fp8tune compact --db results.db"),
    ("And keep all of it in a file for a release", "fp8tune compact --db results.db --archive results-full.db.xz"),
    ("Into another file", "fp8tune compact -o small.db"),
)
def compact(
    db: WrittenDatabase = None,
    output: Annotated[
        Path | None,
        Option("-o, --output", "Write here and leave the database as it is.", "in place", None, None, Group.OUTPUT),
    ] = None,
    archive: Annotated[
        Path | None,
        Option("--archive", "First compress all of it, as it is, into a new FILE.db.xz.", "none", group=Group.OUTPUT),
    ] = None,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """Make a database several times smaller.

    The trials of each problem that was swept to its end are packed into one row. All that commands say stays the same.
    Only the samples of screens are left out; fp8tune import reads them back from an archive into another database.

    A new file replaces the old one whole or not at all. A later sweep goes on as before. Of a server, -o writes a file.
    """
    from fp8tune.render import contracts
    from fp8tune.render.progress import Display
    from fp8tune.store import database
    from fp8tune.store.compacting import compact as made_compact
    from fp8tune.store.compacting import file_of
    from fp8tune.sweep.picks import keep_current

    db = database_to_write(db, create=False)
    if database.path_of(db) is None and output is None:
        raise UsageError("a server looks after its own space: -o FILE writes its rows into a small file")
    with Display() as display, file_of(db) as path:
        done = made_compact(
            path, output, archive, lambda done, total: display.update("problems read", done, total), keep_current
        )
    if format is TableFormat.JSON:
        print_json(contracts.compacted(done, archive))
        return
    shown = [
        ("size", f"{_mb(done.bytes_before)} before, {_mb(done.bytes_after)} now"),
        ("trials", f"{done.trials:,}, {done.packed:,} of them packed, of {done.problems:,} finished problems"),
        ("samples", f"those of {done.left_out:,} screen trials left out"),
    ]
    if archive is not None and done.archive_bytes is not None:
        shown.append(("archive", f"{_mb(done.archive_bytes)}: fp8tune import {visible(str(archive))} reads it"))
    print(visible(str(done.path)))
    for name, value in shown:
        print(f"  {name:<8} {value}")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
