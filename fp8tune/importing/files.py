"""Import of another fp8tune database, or of published measurements in a CSV. All or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.importing import published
from fp8tune.importing.published import LookupKey
from fp8tune.records import Device, Row
from fp8tune.store.merge import READABLE
from fp8tune.store.read import Reading
from fp8tune.store.results import Store

PUBLISHED_SWEEP = "published"
"""The one sweep that published rows belong to in every database, so that importing them twice doubles nothing."""

_SQLITE_MAGIC = b"SQLite format 3\x00"
_PROGRESS_ROWS = 1000  # from one report of progress to the next

Progress = Callable[[int, int], None]
"""Takes the number of rows stored and of all rows."""


@dataclass(frozen=True)
class ImportReport:
    """Numbers of rows of an import."""

    added: int
    already_there: int


@dataclass(frozen=True)
class Loaded:
    """A file that was read and checked, ready to be stored: rows of a CSV, or a database."""

    path: Path
    rows: tuple[Row, ...] = ()
    is_database: bool = False

    def store(self, store: Store, progress: Progress = lambda done, total: None) -> ImportReport:
        """Put it into an open store, all or nothing. Raises DatabaseError for a database that cannot be merged."""
        if self.is_database:
            with Reading.open(str(self.path), writable=False, versions=READABLE) as database:
                return ImportReport(*store.merge(database))

        def counted() -> Iterator[Row]:
            for done, row in enumerate(self.rows):
                if done % _PROGRESS_ROWS == 0:
                    progress(done, len(self.rows))
                yield row

        device, command = Device(arch="published"), "fp8tune db import"
        sweep = store.begin_sweep(PUBLISHED_SWEEP, device, command=command, uid=PUBLISHED_SWEEP)
        added = store.add_many(sweep, counted())
        store.finish_sweep(sweep)
        return ImportReport(added, len(self.rows) - added)


def load(path: Path, lookup_key: LookupKey = lambda problem: None) -> Loaded:
    """Read and check a database or a CSV, told apart by content.

    Without ``lookup_key``, which loads kernels, rows stay evidence and are not exported.

    Raises:
        UsageError: A CSV cannot be used; the message names file and line.
        DatabaseError: It is another file.
    """
    try:
        with path.open("rb") as file:
            is_database = file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give a database or a CSV file") from None
    if is_database:
        return Loaded(path, is_database=True)
    if path.suffix.lower() not in (".csv", ".txt"):
        raise DatabaseError(f"{path} is no fp8tune database, nor named .csv: give the file that another fp8tune wrote")
    return Loaded(path, tuple(published.read(path, lookup_key)))
