"""``fp8tune compact``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fp8tune.commands.options import database_to_write
from fp8tune.errors import UsageError
from fp8tune.options import Group, JsonOrTable, Option, TableFormat, WrittenDatabase, examples
from fp8tune.render.terminal import print_json
from fp8tune.text import visible
from fp8tune_kernels.spec import NamedInts

if TYPE_CHECKING:
    from fp8tune.store.results import Store


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
    """Make a database small enough to commit.

    Keeps picks, confirmations, the 28 fastest other configs of each problem, configs that are picked anywhere for the
    kernel, and counts of the rest. Samples and the trials of coarse passes go: --archive keeps everything in a file
    that fp8tune import reads.
    """
    from fp8tune.importing import archives
    from fp8tune.render import contracts
    from fp8tune.store import database
    from fp8tune.store.results import Store
    from fp8tune.sweep import picks

    db = database_to_write(db)
    path = database.path_of(db)
    if path is None and output is None:
        raise UsageError("a server looks after its own space: -o FILE writes its rows into a small file")
    with Store.open(db, writable=False) as source:
        if output is not None:
            if path is not None:
                archives.copy(path, output)
            else:
                _copy_rows(source, output)
            path = output
    assert path is not None
    before = path.stat().st_size
    archived = None if archive is None else archives.write(path, archive)
    with Store.open(str(path)) as store:
        pruned = store.prune(_configs_in_use(store))
        picks.keep_current(store)
    after = path.stat().st_size
    if format is TableFormat.JSON:
        print_json(contracts.compacted(path, before, after, pruned, archive, archived))
        return
    print(visible(str(path)))
    print(f"  size     {_mb(before)} before, {_mb(after)} now")
    print(f"  removed  {pruned.results:,} results and {pruned.trials:,} trials; {pruned.kept:,} results are kept")
    if archive is not None and archived is not None:
        print(f"  archive  {_mb(archived)}: fp8tune import {visible(str(archive))} reads it")


def _copy_rows(source: Store, target: Path) -> None:
    """Copy all rows of a server into a new file."""
    from fp8tune.store.results import Store

    if target.exists():
        raise UsageError(f"{target} is there already: give another name, or remove it")
    with Store.open(str(target), create=True) as store:
        store.merge(source)


def _configs_in_use(store: Store) -> set[tuple[str, NamedInts]]:
    """Return each kernel with each config that is picked anywhere for it, from scratch or not, or is in a table."""
    from fp8tune.studies import read_studies
    from fp8tune.tables.current import NO_TABLES, SHIPPED, completed
    from fp8tune_kernels.arches import ARCHES
    from fp8tune_kernels.tables import table

    studies = [study for tables in (NO_TABLES, SHIPPED) for study in read_studies(store, tables=tables)]
    configs = {(study.problem.kernel, study.pick.config) for study in studies if study.pick.config is not None}
    in_tables = [(row[0], NamedInts(row[3])) for arch in ARCHES for row in table(arch).rows]
    versions = {study.version.kernel: study.version for study in studies if study.version is not None}
    return configs | {(kernel, completed(config, versions.get(kernel)) or config) for kernel, config in in_tables}


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
