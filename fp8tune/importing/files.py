"""Bringing in rows from elsewhere: another fp8tune database, or a CSV of published measurements. All or nothing.

A CSV row of a kernel becomes one of kind ``published`` with its source. What sources do not say is ``unstated``: the
routing, the scale mode, the config. The FP8 dtype is the arch's own. ``transposed view as input`` in the note makes the
input layout ``transposed``, which is another problem than ``contiguous``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import DatabaseError, UsageError, unknown
from fp8tune.importing import archives, published
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Published, Row, Status
from fp8tune.store.merge import READABLE
from fp8tune.store.read import Reading
from fp8tune.store.results import Store
from fp8tune.store.texts import ARCH, UNSTATED
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS

COLUMNS = ("source", "device", "arch", "kernel", "shape", "config", "us", "note")
"""The header of a CSV of published measurements."""

PUBLISHED_SWEEP = "published"
"""The one sweep that published rows belong to in every database, so that importing them twice doubles nothing."""

_TRANSPOSED = "transposed view as input"
_SQLITE_MAGIC = b"SQLite format 3\x00"

_PROGRESS_ROWS = 1000  # from one report of progress to the next

Progress = Callable[[int, int], None]
"""Takes the rows stored and all there are."""

LookupKey = Callable[[Problem], NamedInts | None]
"""Problem -> its key in the table, or None. Raises UsageError or ValueError for one that the kernel cannot have."""


@dataclass(frozen=True)
class ImportReport:
    """What an import did."""

    added: int
    already_there: int
    of_operations: bool = False
    """Whether the rows are of whole operations: there are no configs among them."""


def _no_lookup_key(problem: Problem) -> NamedInts | None:
    """For importing without loading kernels: rows stay evidence and are not exported."""
    return None


@dataclass(frozen=True)
class Loaded:
    """A file that was read and checked, ready to be stored: rows of one kind, or a database (``path``)."""

    path: Path
    rows: tuple[Row, ...] = ()
    published: tuple[Published, ...] = ()

    def store(self, store: Store, progress: Progress = lambda done, total: None) -> ImportReport:
        """Put it into an open store, all or nothing. Raises DatabaseError for a database that cannot be merged."""
        if self.rows:
            device = Device(arch="published")
            sweep = store.begin_sweep(
                PUBLISHED_SWEEP, device, command="fp8tune import", commit="", timer="", seed=0, uid=PUBLISHED_SWEEP
            )
            added = store.add_many(sweep, _counted(self.rows, progress))
            store.finish_sweep(sweep)
            return ImportReport(added, len(self.rows) - added)
        if self.published:
            added = store.add_published(self.published)
            return ImportReport(added, len(self.published) - added, of_operations=True)
        if _is_csv(self.path):
            return ImportReport(0, 0)
        with Reading.open(str(self.path), writable=False, versions=READABLE) as other:
            return ImportReport(*store.merge(other))


def load(path: Path, lookup_key: LookupKey = _no_lookup_key) -> Loaded:
    """Read and check a database or a CSV, told apart by content.

    Raises UsageError naming file and line for a CSV that cannot be used, DatabaseError for such a database.
    """
    if not _is_csv(path):
        return Loaded(path)
    if published.is_of_operations(path):
        return Loaded(path, published=tuple(published.read_operations(path)))
    return Loaded(path, rows=tuple(read_published(path, lookup_key)))


def import_file(store: Store, path: Path, *, lookup_key: LookupKey = _no_lookup_key) -> ImportReport:
    """:func:`load` a file and store it: where either fails, nothing is written."""
    with archives.unpacked(path) as found:
        return load(found, lookup_key).store(store)


def read_published(path: Path, lookup_key: LookupKey = _no_lookup_key) -> list[Row]:
    """The rows of a CSV with the columns :data:`COLUMNS`. Raises UsageError naming file and line."""
    known_key = functools.cache(lookup_key)  # a file repeats a few problems
    return published.read(path, COLUMNS, lambda fields: _published(fields, known_key))


def _is_csv(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give a database or a CSV file") from None
    if start == _SQLITE_MAGIC:
        return False
    if path.suffix.lower() in (".csv", ".txt"):
        return True
    raise DatabaseError(f"{path} is no fp8tune database, nor named .csv: give the file that another fp8tune wrote")


def _counted(rows: Sequence[Row], progress: Progress) -> Iterator[Row]:
    for done, row in enumerate(rows):
        if done % _PROGRESS_ROWS == 0:
            progress(done, len(rows))
        yield row
    progress(len(rows), len(rows))


def _published(fields: Mapping[str, str], lookup_key: LookupKey) -> Row:
    """One line as a row. Raises UsageError or ValueError saying what is wrong with it."""
    note, arch = published.line("note", fields["note"]), fields["arch"]
    if not ARCH.fullmatch(arch):
        raise unknown("arch", arch[:80], ARCHES)
    if (kernel := fields["kernel"]) not in KERNELS:
        raise unknown("kernel", kernel[:80], KERNELS)
    problem = _problem(kernel, fields["shape"], arch, is_transposed=_TRANSPOSED in note)
    time_us = published.microseconds("us", fields["us"])
    return Row(
        problem=problem,
        config=published.named_ints(fields["config"]) if fields["config"] else None,
        device=_device(arch, published.line("device", fields["device"])),
        kind=Kind.PUBLISHED,
        outcome=Outcome(Status.OK, time_us),
        lookup_key=lookup_key(problem),
        source=published.source(fields["source"]),
        note=note,
        process=f"figure {time_us!r}",  # each printed figure counts as one, and only once
    )


@functools.lru_cache(65536)  # a file repeats a few problems
def _problem(kernel: str, shape: str, arch: str, *, is_transposed: bool) -> Problem:
    return Problem(
        kernel=kernel,
        shape=published.shape(shape),
        routing=UNSTATED,
        input_layout="transposed" if is_transposed else "contiguous",
        fp8_dtype=ARCHES[arch].fp8_dtype if arch in ARCHES else UNSTATED,
        scale_mode=UNSTATED,
    )


_device = functools.lru_cache(1024)(Device)
