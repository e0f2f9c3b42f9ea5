"""Files of a format, in a folder: what is stale, and writing it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.export.given import File
from fp8tune.export.table import read, replace_files


@dataclass(frozen=True)
class Placed:
    """A file where the user wants it."""

    path: Path
    text: str
    is_stale: bool
    """Whether it is not there, or says something else."""


def placed(files: Iterable[File], folder: Path) -> list[Placed]:
    """The files below a folder. Raises UsageError for one that would leave it."""
    found = []
    for file in files:
        if file.path.is_absolute() or ".." in file.path.parts:
            raise UsageError(f"refused to write {str(file.path)[:100]!r}, which is not below {folder}")
        path = folder / file.path
        found.append(Placed(path, file.text, read(path) != file.text))
    return found


def write(files: Iterable[Placed]) -> None:
    """Write those that are stale, all or none, with their folders. Raises UsageError."""
    stale = {file.path: file.text for file in files if file.is_stale}
    for path in stale:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path.parent} cannot be made: {error.strerror}; name another with --output") from None
    replace_files(stale)
