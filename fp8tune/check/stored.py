"""What may be wrong with a database: its file, its rows, sweeps that were broken off."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from fp8tune.check.finding import Finding, Level
from fp8tune.redaction import redacted
from fp8tune.revisions import git
from fp8tune.store.results import Store


def check(db: str, store: Store) -> list[Finding]:
    """Integrity, contents, sweeps that were broken off."""
    damage = store.integrity()
    if damage:
        return [Finding(Level.ERROR, f"{db} is damaged: {damage[0]}", way_back(db))]
    rows = [f"{arch} {count:,} {kind}" for (arch, kind), count in store.counts().items()]
    if published := store.published():
        impossible = sum(bool(row.impossible) for row in published)
        flagged = f" ({impossible} impossible as printed)" if impossible else ""
        rows.append(f"{len(published)} published of operations{flagged}")
    what = f"{redacted(db)}: sound; rows: {', '.join(rows) or 'none'}"
    findings = [Finding(Level.OK, what)]
    if "://" not in db and not os.access(db, os.W_OK):
        fix = f"make it writable (chmod u+w {db}), or give sweep another file with --db"
        findings.append(Finding(Level.WARNING, f"{db} cannot be written", fix))
    for command in dict.fromkeys(store.unfinished_sweeps()):
        what = f"a sweep was not finished: {command or 'its command is not known'}"
        findings.append(Finding(Level.WARNING, what, "run the same command again: it continues where it stopped"))
    return findings


def way_back(db: str) -> str:
    """What to do with a database that cannot be read any more."""
    if "://" in db:
        return "restore it from the server's backup"
    away = [f"mv {db} {db}.damaged"]
    away += [
        f"mv {log} {db}.damaged{log.name.removeprefix(Path(db).name)}"
        for log in (Path(f"{db}-wal"), Path(f"{db}-shm"))
        if log.exists()
    ]
    if git.tracks(Path(db)):
        away.append(f"then git checkout -- {db} for the rows committed last")
    return (
        f"{'; '.join(away)}; fp8tune db import COPY adds the rows of any other copy, and the same sweep command again "
        "measures only what is still missing"
    )


def is_damaged(db: str) -> bool:
    """Whether an SQLite file is cut off or overwritten, as opposed to locked, foreign or of another version."""
    if "://" in db:
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(db)}?mode=ro", uri=True)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
    except UnicodeDecodeError:  # of SQLite's own words on a schema that is no text any more
        return True
    except sqlite3.DatabaseError as error:
        return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
