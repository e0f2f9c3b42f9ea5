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

_MAGIC = b"\xfd7zXZ\x00"
_CHUNK = 2**20


def copy(database: Path, target: Path) -> None:
    """Copy a database, one that is written to as well, into one plain new file."""
    if target.exists():
        raise UsageError(f"{target} is there already: give another name, or remove it")
    if not target.parent.is_dir():
        raise UsageError(f"{target} cannot be made, its folder does not exist: make the folder first")
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            connection.execute("VACUUM INTO ?", (str(target),))
    except sqlite3.Error as error:
        raise DatabaseError(f"{database} cannot be copied ({error}): run fp8tune doctor --db {database}") from None


def write(database: Path, archive: Path) -> int:
    """Compress a database into a new archive. Returns its bytes."""
    if archive.exists():
        raise UsageError(f"{archive} is there already: give another name, or remove it")
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
    """Unpack an archive into a temporary folder; any other file is taken as it is.

    Raises:
        DatabaseError: The archive is damaged or too large.
    """
    try:
        with path.open("rb") as file:
            is_archive = file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        is_archive = False  # whoever reads it names the cause
    if not is_archive:
        yield path
        return
    with scratch.folder("import") as folder:
        database = folder / "archive.db"
        _decompress(path, database)
        yield database


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
