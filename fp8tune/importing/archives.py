"""Whole databases as one compressed file (``.db.xz``), such as a release carries."""

from __future__ import annotations

import contextlib
import lzma
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fp8tune import scratch
from fp8tune.errors import DatabaseError, UsageError

LARGEST_DATABASE = 2**32
"""An archive that comes to more bytes is refused before it fills the disk."""

_CHUNK = 2**20


def copy(database: Path, target: Path) -> None:
    """Copy a database, even one that is written to, into one plain new file."""
    _check_new(target)
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            connection.execute("VACUUM INTO ?", (str(target),))
    except sqlite3.Error as error:
        raise DatabaseError(f"{database} cannot be copied ({error}): run fp8tune doctor --db {database}") from None


def write(database: Path, archive: Path) -> int:
    """Compress a database into a new archive. Returns its size in bytes."""
    _check_new(archive)
    with scratch.folder("archive") as folder:
        copy(database, folder / "plain.db")
        part = archive.with_name(f".{archive.name}.new")
        try:
            with (folder / "plain.db").open("rb") as source, lzma.open(part, "wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
            part.replace(archive)
        finally:
            part.unlink(missing_ok=True)
    return archive.stat().st_size


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Unpack an archive into a temporary folder; any other file stays where it is.

    Raises:
        DatabaseError: The archive is damaged or too large.
    """
    if path.suffix != ".xz" or not path.is_file():
        yield path
        return
    with scratch.folder("import") as folder:
        database, size = folder / "archive.db", 0
        try:
            with lzma.open(path, "rb") as source, database.open("wb") as target:
                while chunk := source.read(_CHUNK):
                    size += len(chunk)
                    if size > LARGEST_DATABASE:
                        raise DatabaseError(f"{path} comes to more than {LARGEST_DATABASE:,} bytes: give another file")
                    target.write(chunk)
        except (lzma.LZMAError, EOFError):
            raise DatabaseError(f"{path} is damaged (cut off or overwritten): fetch it again") from None
        yield database


def _check_new(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{path} is there already: give another name, or remove it")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be made, its folder does not exist: make the folder first")
