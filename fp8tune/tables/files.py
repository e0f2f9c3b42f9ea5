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
    """One file of an export."""

    path: PurePosixPath
    """Relative to the folder that the user names."""
    text: str


@dataclass(frozen=True)
class Target:
    """A file in the user's folder."""

    path: Path
    text: str
    is_stale: bool
    """True if the file does not exist or differs."""


def targets(files: Iterable[File], folder: Path) -> list[Target]:
    """Return the files in a folder.

    Raises:
        UsageError: A path would leave the folder.
    """
    chosen = []
    for file in files:
        if file.path.is_absolute() or ".." in file.path.parts:
            raise UsageError(f"{str(file.path)[:100]!r} is outside of {folder}: it is not written")
        path = folder / file.path
        chosen.append(Target(path, file.text, read(path) != file.text))
    return chosen


def read(path: Path) -> str | None:
    """Return the text of a file; None if there is none, or if it is not UTF-8.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        return path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give another place with --output") from None


def write(files: Iterable[Target]) -> None:
    """Write stale files, all or none, with their folders.

    Raises:
        UsageError: A file cannot be written.
    """
    stale = sorted((file for file in files if file.is_stale), key=lambda file: file.path)  # no deadlock of two writers
    path = None
    try:
        with contextlib.ExitStack() as locks:
            drafts = []
            for file in stale:
                path = file.path
                drafts.append(locks.enter_context(_draft(path)))
                _fill(drafts[-1], path, file.text)
            for file, draft in zip(stale, drafts, strict=True):
                os.replace(draft.name, file.path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; give another place with --output") from None


def update(path: Path, change: Callable[[str | None], str]) -> bool:
    """Read a file, change its text and write it, in one step that excludes other writers.

    Args:
        path: The file. Its folder is made.
        change: Function from the text before, None without a file, to the new text.

    Returns:
        True if the text changed.

    Raises:
        UsageError: The file cannot be read or written.
    """
    try:
        with _draft(path) as draft:
            before = read(path)
            text = change(before)
            if text != before:
                _fill(draft, path, text)
                os.replace(draft.name, path)
            return text != before
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; give another place with --output") from None


def _fill(draft: BinaryIO, path: Path, text: str) -> None:
    draft.truncate(0)  # a killed writer may have left some
    draft.write(text.encode())
    draft.flush()
    os.fsync(draft.fileno())
    if path.exists():
        os.fchmod(draft.fileno(), path.stat().st_mode & 0o777)


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[BinaryIO]:
    """Open the only draft of a file, locked: renaming it replaces the file.

    The draft is the lock, so that nothing is left beside the file. A waiting process finds that its draft was renamed
    or removed, and opens the next one. The lock of a killed process ends with it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}.draft"
    while True:
        with name.open("ab") as draft:
            fcntl.flock(draft, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(draft.fileno()), name.stat())
            except FileNotFoundError:
                is_current = False
            if is_current:
                try:
                    yield draft
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        if os.path.samestat(os.fstat(draft.fileno()), name.stat()):
                            name.unlink()
                return
