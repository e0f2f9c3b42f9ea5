"""Files that appear whole or not at all, however many processes write them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fp8tune.errors import UsageError


@dataclass(frozen=True)
class File:
    """One file of an export; the path is relative to the folder that the user names."""

    path: PurePosixPath
    text: str


def write(files: Iterable[File], folder: Path, *, is_dry: bool = False) -> dict[Path, bool]:
    """Write files below a folder, or only compare them. Return each path with True if its text was another."""
    targets = {folder / file.path: file for file in files}
    for file in targets.values():
        if file.path.is_absolute() or ".." in file.path.parts:
            raise UsageError(f"{str(file.path)[:100]!r} is outside of {folder}: it is not written")
    return {path: read(path) != file.text if is_dry else update(path, file.text) for path, file in targets.items()}


def read(path: Path) -> str | None:
    """Return the text of a file; None if there is none, or none in UTF-8."""
    with _reported(path, "read"):
        try:
            return path.read_bytes().decode()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None


def update(path: Path, change: str | Callable[[str | None], str]) -> bool:
    """Read a file, change its text and write it, in one step that excludes other writers. Make its folder.

    ``change`` is the new text, or a function from the text before, None without a file. Return True if it changed.
    """
    with _reported(path, "written"), _draft(path) as draft:
        before = read(path)
        text = change if isinstance(change, str) else change(before)
        if text != before:
            draft.truncate(0)  # a killed writer may have left a part
            draft.write(text.encode())
            draft.flush()
            os.fsync(draft.fileno())
            if path.exists():
                os.fchmod(draft.fileno(), path.stat().st_mode & 0o777)
            os.replace(draft.name, path)
        return text != before


@contextlib.contextmanager
def _reported(path: Path, action: str) -> Iterator[None]:
    """Turn an error of the operating system into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be {action}: {error.strerror}; give another place with --output") from None


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[BinaryIO]:
    """Open the only draft of a file, locked: renaming it replaces the file.

    The draft is the lock, so that nothing is left beside the file. A process that waited finds its draft renamed or
    removed, and opens the next one. The lock of a killed process ends with it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}.draft"
    is_current = False
    while not is_current:
        with name.open("ab") as draft:
            fcntl.flock(draft, fcntl.LOCK_EX)
            is_current = _is_same(draft, name)
            if is_current:
                try:
                    yield draft
                finally:
                    if _is_same(draft, name):
                        name.unlink()


def _is_same(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
