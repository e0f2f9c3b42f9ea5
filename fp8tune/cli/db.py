"""``fp8tune db``: import, prune and forget results."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path

import typer

from fp8tune import names
from fp8tune.errors import UsageError
from fp8tune.filters import Filters
from fp8tune.importing import archives, foreign
from fp8tune.importing import files as importing
from fp8tune.options import ForgetOptions, ImportOptions, PruneOptions
from fp8tune.output.progress import Display
from fp8tune.output.tables import notice
from fp8tune.output.text import counted
from fp8tune.store import database, location
from fp8tune.store.results import Store
from fp8tune.studies import read_studies
from fp8tune.sweeping import session
from fp8tune.sweeping.picks import keep_current
from fp8tune.tables.current import NO_TABLES, SHIPPED, completed
from fp8tune.text import visible
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import NamedInts
from fp8tune_kernels.tables import table, versions

NOUNS = {"studies": "size", "results": "result", "sweeps": "sweep", "processes": "process"}
"""Tables that ``forget`` deletes from, with a word for their rows."""


def import_(options: ImportOptions) -> None:
    """Merge files into a database."""
    if not options.paths:
        raise UsageError("nothing to import: name a database, a CSV file, or tuned files of others")
    paths = [Path(path) for path in options.paths]
    picks = {path: foreign.read(path, notice, options.kernel) for path in paths if foreign.is_foreign(path)}
    with contextlib.ExitStack() as stack:
        unpacked = {path: stack.enter_context(archives.unpacked(path)) for path in paths if path not in picks}
        loaded = {path: importing.load(file, session.lookup_key) for path, file in unpacked.items()}
        store = stack.enter_context(Store.open(db := location.to_write(options.db), create=True))
        for path in paths:
            if path in picks:
                rows = foreign.RowMaker(store, options.device, notice).rows(picks[path])
                if not rows:
                    raise UsageError(f"{visible(str(path))}: none of its configs can be stored")
                loaded[path] = importing.Loaded(path, rows=tuple(rows))
            with Display() as display:
                report = loaded[path].store(store, lambda done, total: display.update("storing", done / max(1, total)))
            added = counted(report.added, "result")
            print(f"{visible(str(path))}: {added} added, {report.already_there} already there in {database.label(db)}")
        keep_current(store)


def prune(options: PruneOptions) -> None:
    """Make a database small enough to commit."""
    path = database.path_of(db := location.to_write(options.db))
    if path is None:
        label = database.label(db)
        raise UsageError(f"{label} is a server, which prune does not change: import its results into a file")
    with Store.open(db, writable=False):  # before the archive is written: not every file is a database
        before = path.stat().st_size
    archived = None if options.archive is None else archives.write(path, Path(options.archive))
    with Store.open(str(path)) as store:
        pruned = store.prune(_configs_in_use(store))
        keep_current(store)
    print(f"{visible(str(path))}: {before / 1e6:.1f} MB before, {path.stat().st_size / 1e6:.1f} MB now")
    print(f"removed {pruned.results:,} results and {pruned.trials:,} trials; {pruned.remaining:,} results are kept")
    if archived is not None:
        print(f"{visible(str(options.archive))}: {archived / 1e6:.1f} MB, read it with fp8tune db import")


def _configs_in_use(store: Store) -> set[tuple[str, NamedInts]]:
    """Return each kernel with each config that is picked anywhere for it, from scratch or not, or is in a table."""
    studies = [study for tables in (NO_TABLES, SHIPPED) for study in read_studies(store, tables=tables)]
    configs = {(study.problem.kernel, study.pick.config) for study in studies if study.pick.config is not None}
    shipped = [table(arch, triton) for arch in ARCHES for triton in ("", *versions(arch))]
    in_tables = [(row[0], NamedInts(row[3])) for rows in shipped for row in rows.rows]
    declared = {study.version.kernel: study.version for study in studies if study.version is not None}
    return configs | {(kernel, completed(config, declared.get(kernel)) or config) for kernel, config in in_tables}


def forget(options: ForgetOptions) -> None:
    """Delete results, after a question."""
    if not options.targets:
        raise UsageError("TARGET is missing: name a kernel, KERNEL@SIZE or trial:17")
    db = location.to_write(options.db)
    with Store.open(db) as store:
        rows = [row for target in options.targets for row in _rows(store, target)]
        counts = Counter(table for table, _ in rows)
        what = " and ".join(counted(counts[table], noun) for table, noun in NOUNS.items() if counts[table])
        if not options.yes:
            if not sys.stdin.isatty():
                raise UsageError("no terminal to ask in: add --yes to delete without a question")
            if not typer.confirm(f"Delete {what} from {database.label(db)}?", err=True):
                raise UsageError("nothing deleted")
        store.forget(rows)
        keep_current(store)
    print(f"{database.label(db)}: {what} deleted")


def _rows(store: Store, target: str) -> list[tuple[str, int]]:
    """Return the rows that a target names: their tables and numbers. Raises UsageError."""
    table, _, number = target.partition(":")
    table = "results" if table == "trial" else table
    if table in NOUNS and number.isdecimal() and len(number) < 19:
        return [(table, int(number))]
    name, _, size = target.partition("@")
    (kernel,) = names.stored_kernels([name], store)
    filters, studies = Filters.parse(size), store.study_ids(kernel)
    filters.check([study.problem for study in studies.values()], [])
    rows = [("studies", id) for id, study in studies.items() if filters.has_problem(study.problem)]
    if not rows:
        raise UsageError(f"{target:.80} has no results here: fp8tune show lists what has")
    return rows
