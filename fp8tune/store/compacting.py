"""``fp8tune compact``: a database without what nobody reads again, in a new file that replaces it whole or not at all.

Trials that may be compared are packed (:mod:`fp8tune.store.packed`) once their problem was swept to the end. What the
new file says of them is compared with the old before it counts. What cannot be read, or would be read otherwise, stays
as it is. Rows keep their ids, and rows that did not change their bytes: git stores little for a small change.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, select

from fp8tune import scratch
from fp8tune.errors import DatabaseError, UsageError
from fp8tune.records import Kind
from fp8tune.store import archives, database, packed, picks, views
from fp8tune.store.columns import unpack_samples
from fp8tune.store.packed import POOL, Ids, Pool
from fp8tune.store.results import Store
from fp8tune.store.schema import METADATA, Candidates, Completions, PackedTrials, Trials
from fp8tune.store.summaries import packed_summaries, summaries

_COLUMNS = [column.name for column in PackedTrials.c]
_IS_PACKED = (
    "EXISTS (SELECT 1 FROM packed_trials p WHERE " + " AND ".join(f"p.{name} = c.{name}" for name in POOL) + ")"
)

Progress = Callable[[int, int], None]
"""Takes the problems packed and all there are."""


@dataclass(frozen=True)
class Compacted:
    """What became of a database."""

    path: Path
    bytes_before: int
    bytes_after: int
    problems: int
    """Packed, counted by problem, kernel version, device and kind."""
    trials: int
    """All there are."""
    packed: int
    """Of these, those that are packed."""
    left_out: int
    """Of these, those of screens whose samples were left out now."""
    archive_bytes: int | None = None


def compact(
    path: Path,
    output: Path | None,
    archive: Path | None,
    progress: Progress = lambda done, total: None,
    prepare: Callable[[Store], object] = Store.rows_now,
) -> Compacted:
    """Write a database compacted, into its own place or to ``output``; as it was before into ``archive``.

    ``prepare`` gets the copy that is packed, to keep its picks in it.
    Raises DatabaseError where it cannot be read, or another process has it open; UsageError for a file that is there.
    """
    Store.open(str(path), writable=False).close()  # says what is wrong with it
    target = (output or path).resolve()
    for file in (archive, output):
        if file is not None and file.exists():
            raise UsageError(f"{file} is there already: give another name, or remove it")
    before = path.stat().st_size
    with scratch.folder("compact") as folder, _snapshot(path, folder / "before.db", alone=output is None) as old:
        archive_bytes = None if archive is None else archives.write(old, archive)
        with Store.open(str(old)) as store:  # brings it up to date
            prepare(store)
        with archives.replacing(target, there=path.resolve() if output is None else None) as new:
            counts = _build(old, new, progress)
    return Compacted(output or path, before, target.stat().st_size, **counts, archive_bytes=archive_bytes)


@contextlib.contextmanager
def file_of(db: str) -> Iterator[Path]:
    """The file of a database; of a server's a temporary copy."""
    if (path := database.path_of(db)) is not None:
        yield path
        return
    with scratch.folder("compact") as folder:
        copy = folder / "server.db"
        with Store.open(db, writable=False) as server, Store.open(str(copy), create=True) as made:
            made.merge(server)
        yield copy


@contextlib.contextmanager
def _snapshot(path: Path, copy: Path, *, alone: bool) -> Iterator[Path]:
    """A copy of a database; ``alone``: nobody else has it open, or opens it before the end."""
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as source:
            if alone:
                if source.execute("PRAGMA journal_mode=DELETE").fetchone() != ("delete",):  # another has it in WAL mode
                    raise sqlite3.OperationalError("locked")
                source.execute("PRAGMA locking_mode=EXCLUSIVE")  # until it is closed: a backup allows no transaction
                source.execute("BEGIN EXCLUSIVE")
                source.execute("COMMIT")
            with contextlib.closing(sqlite3.connect(copy)) as target:
                source.backup(target)
            yield copy
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise DatabaseError(f"{path} cannot be compacted: {error}") from None
        raise DatabaseError(f"{path} is open in another process: let that end, then run this again") from None


def _build(old: Path, new: Path, progress: Progress) -> dict[str, int]:
    """Make the new file of a copy of the old one that nobody else has. Returns what was packed."""
    made = database.connect(str(new), create=True, writable=True)
    try:
        with database.transaction(made, write=True):
            METADATA.create_all(made)
    finally:
        database.close(made, wrote=False)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as raw:
        raw.execute("ATTACH ? AS old", (str(old),))
        raw.execute("BEGIN")
        there = {name for (name,) in raw.execute("SELECT name FROM old.sqlite_master WHERE type = 'table'")}
        for table in METADATA.sorted_tables:
            if table.name in there and table not in packed.TABLES:
                _copy(raw, table.name, [column.name for column in table.c])
        left_out = _pack(old, raw, progress)
        for table in packed.TABLES:
            _copy_plain(raw, table.name, [column.name for column in table.c])
            _keep_ids(raw, table.name)
        raw.execute("COMMIT")
        counts = _counts(raw)
        raw.execute("DETACH old")
    _make_views(old, new)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as raw:
        raw.execute("PRAGMA page_size=2048")  # a packed row ends in a page of its own: 5 % less than with 4,096
        raw.execute("VACUUM")
        if raw.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
            raise DatabaseError("the compacted database is damaged, and nothing was replaced: check the disk")
    return counts | {"left_out": left_out}


def _make_views(old: Path, new: Path) -> None:
    """Make the views, and say of picks that were decided from the old rows that they are decided from the new ones."""
    with contextlib.closing(database.connect(str(old), create=False, writable=False)) as connection:
        is_current = picks.decided_from(connection)[0] == picks.rows_now(connection)
    made = database.connect(str(new), create=False, writable=True)
    try:
        with database.transaction(made, write=True):
            views.create(made)
            if is_current:
                views.state(made, views.DECIDED_FROM, picks.rows_now(made))
    finally:
        database.close(made, wrote=False)


def _copy(raw: sqlite3.Connection, table: str, columns: list[str], where: str = "") -> None:
    names = ", ".join(f'"{name}"' for name in columns)
    raw.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM old.{table} c {where} ORDER BY 1")


def _copy_plain(raw: sqlite3.Connection, table: str, columns: list[str]) -> None:
    """The rows of candidates that were not packed."""
    if table == Candidates.name:
        _copy(raw, table, columns, f"WHERE NOT {_IS_PACKED}")
    else:
        of_packed = f"SELECT c.id FROM old.candidates c WHERE {_IS_PACKED}"
        _copy(raw, table, columns, f"WHERE candidate_id NOT IN ({of_packed})")


def _keep_ids(raw: sqlite3.Connection, table: str) -> None:
    """No row will get the id of one that is packed."""
    has = "SELECT 1 FROM old.sqlite_master WHERE name = 'sqlite_sequence'"
    given = [f"SELECT max(id) FROM old.{table}"]
    if raw.execute(has).fetchone():
        given.append(f"SELECT seq FROM old.sqlite_sequence WHERE name = '{table}'")
    last = max((row[0] or 0 for query in given for row in raw.execute(query)), default=0)
    if METADATA.tables[table].dialect_options["sqlite"]["autoincrement"] and last:
        raw.execute("DELETE FROM main.sqlite_sequence WHERE name = ?", (table,))
        raw.execute("INSERT INTO main.sqlite_sequence (name, seq) VALUES (?, ?)", (table, last))


def _pack(old: Path, raw: sqlite3.Connection, progress: Progress) -> int:
    """Pack what is finished. Returns how many trials of screens had samples."""
    left_out = 0
    with contextlib.closing(database.connect(str(old), create=False, writable=False)) as connection:
        finished = _finished(connection)
        for done, ids in enumerate(finished):
            progress(done, len(finished))
            if (row := _packed(connection, ids)) is not None:
                marks = ", ".join("?" * len(_COLUMNS))
                raw.execute(
                    f"INSERT INTO main.packed_trials ({', '.join(_COLUMNS)}) VALUES ({marks})",
                    [row[name] for name in _COLUMNS],
                )
                left_out += _screens(connection, ids)
        progress(len(finished), len(finished))
    return left_out


def _finished(connection: Connection) -> list[Ids]:
    """What was swept to the end here and is not packed."""
    of = Candidates.c
    is_complete = select(Completions.c.id).where(
        Completions.c.problem_id == of.problem_id,
        Completions.c.version_id == of.version_id,
        Completions.c.device_id == of.device_id,
    )
    query = select(*(of[name] for name in POOL)).where(of.kind != str(Kind.PUBLISHED), is_complete.exists())
    try:
        return sorted({(row[0], row[1], row[2], row[3]) for row in connection.execute(query.distinct())})
    except DatabaseError:
        return []


def _packed(connection: Connection, ids: Ids) -> dict[str, Any] | None:
    """Plain rows as a packed one; None where it would not say the same of each candidate and sample."""
    mine = _candidates(ids)
    try:
        row = packed.packed(connection, ids)
        pool = Pool(SimpleNamespace(**row))
        pool.check()
        for table in packed.TABLES:
            names = packed.columns_of(table)
            of = table.c.id if table is Candidates else table.c.candidate_id
            query = select(*(table.c[name] for name in names)).where(of.in_(mine)).order_by(table.c.id)
            if pool.rows(table, names) != [tuple(found) for found in connection.execute(query)]:
                return None
        query = select(Trials.c.stage, Trials.c.samples).where(Trials.c.candidate_id.in_(mine)).order_by(Trials.c.id)
        stored = [() if stage == "screen" else unpack_samples(blob) for stage, blob in connection.execute(query)]
        if pool.samples() != stored or dict(packed_summaries(pool)) != dict(summaries(connection, mine)):
            return None
    except (DatabaseError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return row


def _candidates(ids: Ids) -> Any:
    return select(Candidates.c.id).where(*(Candidates.c[name] == value for name, value in zip(POOL, ids, strict=True)))


def _screens(connection: Connection, ids: Ids) -> int:
    query = select(Trials.c.id).where(Trials.c.candidate_id.in_(_candidates(ids)), Trials.c.stage == "screen")
    return len(connection.execute(query.where(Trials.c.samples != b"")).all())


def _counts(raw: sqlite3.Connection) -> dict[str, int]:
    """Raises DatabaseError where trials are missing."""
    problems, in_packed = raw.execute("SELECT count(*), coalesce(sum(trials), 0) FROM main.packed_trials").fetchone()
    (plain,) = raw.execute("SELECT count(*) FROM main.trials").fetchone()
    (before,) = raw.execute("SELECT count(*) FROM old.trials").fetchone()
    has = "SELECT 1 FROM old.sqlite_master WHERE name = 'packed_trials'"
    if raw.execute(has).fetchone():
        before += raw.execute("SELECT coalesce(sum(trials), 0) FROM old.packed_trials").fetchone()[0]
    if before != plain + in_packed:
        raise DatabaseError("the compacted database lacks trials, and nothing was replaced: run fp8tune doctor")
    return {"problems": problems, "trials": before, "packed": in_packed}
