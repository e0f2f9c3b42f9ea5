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


def write(database: Path, archive: Path) -> int:
    """Compress a database, even one that is written to, into a new archive. Returns its size in bytes."""
    if archive.exists():
        raise UsageError(f"{archive} is there already: give another name, or remove it")
    if not archive.parent.is_dir():
        raise UsageError(f"{archive} cannot be made, its folder does not exist: make the folder first")
    part = archive.with_name(f".{archive.name}.new")
    with scratch.folder("archive") as folder:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
                connection.execute("VACUUM INTO ?", (str(folder / "plain.db"),))
            with (folder / "plain.db").open("rb") as source, lzma.open(part, "wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
            part.replace(archive)
        except sqlite3.Error as error:
            line = f"{database} cannot be copied ({error}): run fp8tune doctor --db {database}"
            raise DatabaseError(line) from None
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
