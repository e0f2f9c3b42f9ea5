"""Checks of databases: their files, picks that are out of date, and the tables that are made of them."""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from fp8tune.check.findings import Finding, Level
from fp8tune.check.gpus import check_gpus
from fp8tune.errors import DatabaseError, Fp8tuneError, UsageError
from fp8tune.exporting import select_rows, shipped_tables
from fp8tune.measure import device
from fp8tune.records import Device, Kind, Pick
from fp8tune.revisions import git
from fp8tune.stats.same_code import Programs
from fp8tune.store import database, location
from fp8tune.store.database import EmptyDatabaseError, ForeignLogError
from fp8tune.store.results import Store
from fp8tune.studies import installed_hash
from fp8tune.sweeping import picks
from fp8tune.tables.current import INSTALLED
from fp8tune.tables.exported import read_table
from fp8tune.tables.launch_table import default_path, shipped_path
from fp8tune.tables.merge import merge_file
from fp8tune.tables.select import Selection
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.runtime import user_tables


def check_databases(db: str | None) -> Iterator[Finding]:
    """Check ``db`` and the tables that are made of it; without it the user's own and the shipped results."""
    here = device.probe()
    if db is not None:
        yield from check_database(db, here, with_tables=True)
        return
    own, shipped = location.own(), location.base()
    if own != shipped:
        yield from check_database(own, here)
    yield from check_own_tables(user_tables.folder())
    if shipped is None:
        fix = "install a wheel of a release, or run in a checkout that has results.db"
        yield Finding(Level.WARNING, "no results came with this fp8tune", fix)
    else:
        yield from check_database(shipped, here, is_shipped=True)


def check_own_tables(folder: Path | None) -> Iterator[Finding]:
    """Check the user's own launch tables, which are read before the shipped ones."""
    for path in sorted(folder.glob("*.py")) if folder else ():
        try:
            table = read_table(path)
        except UsageError as error:
            yield Finding(Level.ERROR, str(error), "remove it, or write it again with fp8tune export")
            continue
        changed = [kernel for kernel, codes in table.codes.items() if codes - {"", installed_hash(kernel)}]
        for kernel in sorted(changed):
            fix = f"fp8tune sweep --kernel {kernel}, then fp8tune export"
            yield Finding(Level.WARNING, f"{path}: {kernel} has changed since, so launches leave its rows out", fix)


def check_database(
    db: str, here: Device | None, *, with_tables: bool = False, is_shipped: bool = False
) -> Iterator[Finding]:
    """Check one database, a path or URL."""
    label = database.label(db)
    try:
        if not database.exists(db):
            yield _missing(db)
            return
        with Store.open(db, writable=False) as store:
            if faults := store.integrity():
                yield Finding(Level.ERROR, f"{label} is damaged: {faults[0]}", restoring(db))
                return
            yield from _contents(db, store, here, is_shipped)
            if not is_shipped:
                yield from check_gpus(store)
            if with_tables:
                yield from check_tables(store, db)
    except EmptyDatabaseError as error:
        text, _, fix = str(error).rpartition(": ")
        yield Finding(Level.WARNING, text, fix)
    except DatabaseError as error:
        is_torn = not isinstance(error, ForeignLogError) and is_damaged(db)
        yield Finding.from_error(error, restoring(db) if is_torn else "")


def _missing(db: str) -> Finding:
    label, path = database.label(db), database.path_of(db)
    folder = (path or Path(".")).absolute().parent
    if path is None or (folder.is_dir() and os.access(folder, os.W_OK)):
        return Finding(Level.OK, f"{label} does not exist yet: your first sweep makes it")
    fix = f"make {folder} writable, or name another database with {location.VARIABLE} or --db"
    return Finding(Level.WARNING, f"{label} does not exist and cannot be made", fix)


def _contents(db: str, store: Store, here: Device | None, is_shipped: bool) -> Iterator[Finding]:
    known, option = picks.read(store), "" if is_shipped else f" --db {shlex.quote(database.label(db))}"
    newest = max((pick.newest for pick in known), default=0.0)
    age = f", last written {_ago(time.time() - newest)}" if newest else ""
    yield Finding(Level.OK, f"{database.label(db)}: {len(known):,} picks{age}")
    path = database.path_of(db)
    if path is not None and not is_shipped and not os.access(path, os.W_OK):
        fix = f"make it writable (chmod u+w {shlex.quote(str(path))}), or name another database with --db"
        yield Finding(Level.WARNING, f"{database.label(db)} cannot be written", fix)
    if not is_shipped and known and not store.has_kept_picks(picks.decided_by()):
        fix = "nothing: the next sweep or db import into it decides them again"
        yield Finding(Level.WARNING, f"picks of {database.label(db)} were decided by other rules or tables", fix)
    yield from check_stale(known, here, option, picks.known_programs(store))
    commands = [] if is_shipped else [*dict.fromkeys(store.unfinished_sweeps())]
    if commands:
        others = f" and {len(commands) - 1} other sweeps" if commands[1:] else ""
        text = f"not finished: {commands[-1] or 'a sweep'}{others}"
        yield Finding(Level.WARNING, text, "run the same command again to resume")


def check_stale(
    known: list[Pick], here: Device | None, option: str = "", programs: Callable[[], Programs] = Programs
) -> Iterator[Finding]:
    """Find picks of this GPU that were timed with other code, Triton or driver."""
    stale = [pick for pick in known if picks.is_stale(pick, here, programs)]
    for kernel, count in Counter(pick.problem.kernel for pick in stale).items():
        first = next(pick for pick in stale if pick.problem.kernel == kernel)
        count_text = "1 pick" if count == 1 else f"{count} picks"
        text = f"{count_text} of {kernel} {'is' if count == 1 else 'are'} stale: {_difference(first, here)}"
        yield Finding(Level.WARNING, text, f"fp8tune sweep --kernel {kernel}{option}")


def _difference(pick: Pick, here: Device | None) -> str:
    for name in ("triton", "driver"):
        before, now = getattr(pick.device, name), getattr(here, name, "")
        if before != now:
            title = "Triton" if name == "triton" else "driver"
            return f"timed with {title} {before or '(unknown)'}, you have {now}"
    return "its code has changed since"


def check_tables(store: Store, db: str, path_of: Callable[[str], Path] = default_path) -> Iterator[Finding]:
    """Check that the table of each arch is what the database would give."""
    stored = {study.device.arch for study in store.pools() if study.kind in (Kind.MEASURED, Kind.PUBLISHED)}
    for arch in (name for name in ARCHES if name in stored):
        try:
            for path, selection in _tables(store, arch, path_of(arch)):
                if not selection.table.entries:
                    continue
                if merge_file(path, selection, is_dry=True)[1]:
                    fix = f"fp8tune export --arch {arch} --db {shlex.quote(database.label(db))}"
                    yield Finding(Level.WARNING, f"{path.name} is out of date", fix)
                else:
                    yield Finding(Level.OK, f"{path.name} is what {database.label(db)} gives")
        except Fp8tuneError as error:
            yield Finding.from_error(error)


def _tables(store: Store, arch: str, path: Path) -> Iterable[tuple[Path, Selection]]:
    if path == shipped_path(arch):
        return shipped_tables(store, arch, allow_quick=False)
    return [(path, select_rows(store, arch, tables=INSTALLED, allow_quick=False))]


def restoring(db: str) -> str:
    """Say how to get a damaged database back."""
    path = database.path_of(db)
    if path is None:
        return "restore it from the server's backup"
    name = shlex.quote(str(path))
    logs = [log for log in (f"{path}-wal", f"{path}-shm") if Path(log).exists()]  # of no use to another file
    steps = [f"mv {name} {name}.damaged", *(f"mv {shlex.quote(log)} {shlex.quote(log)}.damaged" for log in logs)]
    if git.tracks(path):
        steps.append(f"git checkout -- {name}")
    steps.append(f"sqlite3 {name}.damaged .recover | sqlite3 saved.db; fp8tune db import saved.db")
    return "; ".join(steps)


def is_damaged(db: str) -> bool:
    """Return True if an SQLite file is cut or overwritten, as opposed to locked, foreign or of another version."""
    path = database.path_of(db)
    if path is None:
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
    except UnicodeDecodeError:  # SQLite quotes a schema that is no text any more
        return True
    except sqlite3.DatabaseError as error:
        return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _ago(seconds: float) -> str:
    for size, word in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {word}{'' if count == 1 else 's'} ago"
    return "just now"
