"""SQLite's logs beside a file: whether they are the file's own.

SQLite finds a log by its name alone (``results.db-wal``, ``results.db-journal``). If the file is replaced while a log
lies beside it, the next opening writes the log's pages into a file they do not fit.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_READS = 3
_READ_EVERY_S = 0.02
"""While a process opens or closes the file, one read may see the file before and the log after."""

_DB_HEADER_BYTES = 100
_WRITE_VERSION_BYTE = 18
_JOURNAL, _WAL = 1, 2
_COUNTER = slice(24, 28)
_PAGES = slice(28, 32)
_WAL_HEADER_BYTES = 32
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_JOURNAL_HEADER = struct.Struct(">8sIIIII")  # magic, records, nonce, pages of the file, sector size, page size


def foreign(path: Path) -> Path | None:
    """The log beside a file that is of another file; None where there is none."""
    for _ in range(_READS - 1):
        if _foreign(path) is None:
            return None
        time.sleep(_READ_EVERY_S)
    return _foreign(path)


def says_wal(path: Path) -> bool:
    """Whether the header of a file says that it has a write-ahead log."""
    return _read(path, _WRITE_VERSION_BYTE, 1) == bytes([_WAL])


def beside(path: Path) -> list[Path]:
    """All files that SQLite may have left beside a file."""
    return [log for log in (_named(path, "-wal"), _named(path, "-shm"), _named(path, "-journal")) if log.exists()]


def unmerged(path: Path) -> Path | None:
    """The write-ahead log with rows that are not in the file itself yet."""
    log = _named(path, "-wal")
    return log if _size(log) > _WAL_HEADER_BYTES else None


@dataclass(frozen=True)
class Opened:
    """A file as it was when it was opened."""

    path: Path
    identity: tuple[int, int] | None
    """Its device and its number there."""

    @classmethod
    def at(cls, path: Path) -> Opened:
        """The file at a path."""
        return cls(path.absolute(), _identity(path))

    def is_replaced(self) -> bool:
        """Whether another file, or none, has its name now."""
        return _identity(self.path) != self.identity


def unused(path: Path, suffix: str) -> Path:
    """``results.db.saved``, or ``results.db.saved-2`` and so on where there is one."""
    names = (f"{path.name}.{suffix}{number}" for number in ("", *range(-2, -1000, -1)))
    return next(path.with_name(name) for name in names if not path.with_name(name).exists())


def _foreign(path: Path) -> Path | None:
    header = _read(path, 0, _DB_HEADER_BYTES)
    if len(header) < _DB_HEADER_BYTES:  # SQLite drops the log of an empty file
        return None
    log, journal = unmerged(path), _named(path, "-journal")
    # a file says 2 from before its log is made until after it is gone
    if log is not None and header[_WRITE_VERSION_BYTE] == _JOURNAL:
        return log
    return journal if journal.exists() and not _is_journal_of(journal, header) else None


def _is_journal_of(journal: Path, header: bytes) -> bool:
    """Whether a rollback journal is of the file with this header.

    It holds pages as they were before. The first page counts changes: the file has that count or the next.
    """
    start = _read(journal, 0, _JOURNAL_HEADER.size)
    if len(start) < _JOURNAL_HEADER.size or start[:8] != _JOURNAL_MAGIC:
        return True  # ended, or never begun: SQLite does not use it
    _, _, _, pages, sector, page_size = _JOURNAL_HEADER.unpack(start)
    record = 4 + page_size + 4
    before = 0 if pages == 0 else None
    for number in range((_size(journal) - sector) // record if pages else 0):
        place = sector + number * record
        if _read(journal, place, 4) == b"\0\0\0\1":
            before = int.from_bytes(_read(journal, place + 4, _DB_HEADER_BYTES)[_COUNTER])
            break
    if before is None:
        return int.from_bytes(header[_PAGES]) == int(pages)
    return int.from_bytes(header[_COUNTER]) - before in (0, 1)


def _named(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError:
        return b""


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
