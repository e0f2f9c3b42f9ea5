"""Bringing in rows from elsewhere: another fp8tune database, or a CSV of published measurements. All or nothing.

A CSV row becomes a row of kind ``published`` with its source. What the sources do not say is stored as ``unstated``:
the routing, the scale mode, the config. The FP8 dtype is the arch's own. ``transposed view as input`` in the note makes
the input layout ``transposed``, which is another problem than ``contiguous``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import DatabaseError, UsageError, unknown
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.store.columns import ARCH, LINE, UNSTATED, parse_named_ints
from fp8tune.store.results import Store
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.catalog import KERNELS

COLUMNS = ("source", "device", "arch", "kernel", "shape", "config", "us", "note")
"""The header of a CSV of published measurements."""

LONGEST_US = 1e9
"""A published time above 1,000 s is a typing error."""

PUBLISHED_SWEEP = "published"
"""The one sweep that published rows belong to in every database, so that importing them twice doubles nothing."""

_TRANSPOSED = "transposed view as input"
_SQLITE_MAGIC = b"SQLite format 3\x00"

LookupKey = Callable[[Problem], NamedInts | None]
"""problem -> its key in the exported table; None for a kernel that is not declared here."""


@dataclass(frozen=True)
class ImportReport:
    """What an import did."""

    added: int
    already_there: int


def no_lookup_key(problem: Problem) -> NamedInts | None:
    """For importing without loading kernels: rows stay evidence and are not exported."""
    return None


def import_file(store: Store, path: Path, *, lookup_key: LookupKey = no_lookup_key) -> ImportReport:
    """Import a database or a CSV, told apart by content, into an open store.

    Raises UsageError naming file and line for a CSV that cannot be used, DatabaseError for such a database; in both
    cases nothing is written.
    """
    if _is_csv(path):
        rows = read_published(path, lookup_key)
        added = _store_published(store, rows)
        return ImportReport(added, len(rows) - added)
    with Store.open(str(path), writable=False) as other:
        added, already_there = store.merge(other)
    return ImportReport(added, already_there)


def check_importable(path: Path) -> None:
    """Raise what :func:`import_file` would, as far as reading tells: for before a database is made to import into."""
    if _is_csv(path):
        read_published(path)
    else:
        Store.open(str(path), writable=False).close()


def read_published(path: Path, lookup_key: LookupKey = no_lookup_key) -> list[Row]:
    """The rows of a CSV with the columns :data:`COLUMNS`. Raises UsageError naming file and line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            _check_header(path, header)
            return [_row(path, reader.line_num, header, fields, lookup_key) for fields in reader if fields]
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: save it as CSV in UTF-8") from None
    except csv.Error as error:
        raise UsageError(f"{path} line {reader.line_num}: not CSV ({error}): mend the line") from None


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


def _store_published(store: Store, rows: list[Row]) -> int:
    nobody = Device(arch="published")
    sweep = store.begin_sweep(
        PUBLISHED_SWEEP, nobody, command="fp8tune import", commit="", timer="", seed=0, uid=PUBLISHED_SWEEP
    )
    added = store.add_many(sweep, rows)
    store.finish_sweep(sweep)
    return added


def _check_header(path: Path, header: list[str]) -> None:
    missing = [name for name in COLUMNS if name not in header]
    if missing or len(set(header)) != len(header):
        what = f"lacks the column {missing[0]}" if missing else "names a column twice"
        raise UsageError(f"{path} line 1: the header {what}: it needs {','.join(COLUMNS)}")


def _row(path: Path, line: int, header: list[str], fields: list[str], lookup_key: LookupKey) -> Row:
    if len(fields) != len(header):
        raise UsageError(f"{path} line {line}: {len(fields)} fields, the header has {len(header)}: mend the line")
    try:
        return _published(dict(zip(header, fields, strict=True)), lookup_key)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{path} line {line}: {error}") from None


def _published(fields: Mapping[str, str], lookup_key: LookupKey) -> Row:
    """One line as a row. Raises UsageError or ValueError saying what is wrong with it."""
    note, arch = _line("note", fields["note"]), fields["arch"]
    if not ARCH.fullmatch(arch):
        raise unknown("arch", arch[:80], ARCHES)
    problem = Problem(
        kernel=_kernel(fields["kernel"]),
        shape=_shape(fields["shape"]),
        routing=UNSTATED,
        input_layout="transposed" if _TRANSPOSED in note else "contiguous",
        fp8_dtype=ARCHES[arch].fp8_dtype if arch in ARCHES else UNSTATED,
        scale_mode=UNSTATED,
    )
    time_us = _time_us(fields["us"])
    return Row(
        problem=problem,
        config=parse_named_ints(fields["config"]) if fields["config"] else None,
        device=Device(arch=arch, name=_line("device", fields["device"])),
        kind=Kind.PUBLISHED,
        outcome=Outcome(Status.OK, time_us),
        lookup_key=lookup_key(problem),
        source=_required("source", fields["source"]),
        note=note,
        process=f"figure {time_us!r}",  # each printed figure counts as one, and only once
    )


def _kernel(name: str) -> str:
    if name not in KERNELS:
        raise unknown("kernel", name[:80], KERNELS)
    return name


def _shape(text: str) -> NamedInts:
    shape = parse_named_ints(text)
    if not shape:
        raise ValueError("the shape is empty: write it as name=value pairs, such as M=16640 K=5120 G=64")
    return shape


def _time_us(text: str) -> float:
    try:
        time_us = float(text)
    except ValueError:
        raise ValueError(f"us is {text[:80]!r}, not a number of microseconds") from None
    if not (math.isfinite(time_us) and 0 < time_us <= LONGEST_US) or not text.isascii() or "_" in text:
        raise ValueError(f"us is {text[:80]!r}, not a time between 0 and {LONGEST_US:g} microseconds")
    return time_us


def _line(what: str, text: str) -> str:
    if not LINE.fullmatch(text):
        raise ValueError(f"{what} {text[:80]!r} is too long or holds control characters: write plain text on one line")
    return text


def _required(what: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{what} is empty: every published row names where it was printed")
    return _line(what, text)
