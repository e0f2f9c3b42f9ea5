"""Whole databases as one compressed file (``.db.xz``), such as a release carries: written, and read with a bound."""

from __future__ import annotations

import contextlib
import lzma
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fp8tune import scratch
from fp8tune.errors import DatabaseError, UsageError

LARGEST_DATABASE = 2**32
"""Bytes that an archive may come to: a larger one is refused before it fills the disk."""

_MAGIC = b"\xfd7zXZ\x00"
_CHUNK = 2**20
_PRESET = 6


def is_archive(path: Path) -> bool:
    """Whether a file begins as one that xz compressed."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False  # whoever reads it says so


def write(database: Path, archive: Path) -> int:
    """Compress a file that nobody writes to. Returns the archive's bytes. Raises UsageError for one that is there."""
    with replacing(archive) as new, database.open("rb") as source, lzma.open(new, "wb", preset=_PRESET) as compressed:
        shutil.copyfileobj(source, compressed, _CHUNK)
    return archive.stat().st_size


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The database of an archive in a temporary folder; any other file as it is.

    Raises DatabaseError for an archive that is broken, is too large, or holds no database.
    """
    if not is_archive(path):
        yield path
        return
    with scratch.folder("import") as folder:
        found = folder / "archive.db"
        _decompress(path, found)
        yield found


def _decompress(archive: Path, database: Path) -> None:
    written = 0
    try:
        with lzma.open(archive, "rb") as source, database.open("wb") as target:
            while chunk := source.read(_CHUNK):
                written += len(chunk)
                if written > LARGEST_DATABASE:
                    raise DatabaseError(f"{archive} comes to more than {LARGEST_DATABASE:,} bytes: give another file")
                target.write(chunk)
    except (lzma.LZMAError, EOFError):
        raise DatabaseError(f"{archive} is damaged (cut off or overwritten): fetch it again") from None
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error:
        raise DatabaseError(f"{archive} holds no database: give one that fp8tune compact --archive wrote") from None


@contextlib.contextmanager
def replacing(path: Path, *, there: Path | None = None) -> Iterator[Path]:
    """A new file beside ``path``, which takes its place at the end: whole and on the disk, or not at all.

    ``there``: the file that may be replaced. Raises UsageError for another that is there, and without a folder.
    """
    if path.exists() and path != there:
        raise UsageError(f"{path} is there already: give another name, or remove it")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be made, its folder does not exist: make the folder first")
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        yield new
        if there is not None:
            shutil.copymode(there, new)
        _sync(new)
        os.replace(new, path)
        _sync(path.parent)
    finally:
        for left in (new, Path(f"{new}-journal")):
            left.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
