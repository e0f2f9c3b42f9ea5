"""Atomic file writes that are safe with concurrent writers."""

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
    """File of an export. ``path`` is relative to the folder that the user names."""

    path: PurePosixPath
    text: str


def write(files: Iterable[File], folder: Path, *, is_dry: bool = False) -> dict[Path, bool]:
    """Write the files below ``folder`` unless ``is_dry``. Map each path to True if its text differs."""
    texts = {}
    for file in files:
        if file.path.is_absolute() or ".." in file.path.parts:
            raise UsageError(f"{str(file.path)[:100]!r} is outside of {folder}: it is not written")
        texts[folder / file.path] = file.text
    return {path: read(path) != text if is_dry else update(path, text) for path, text in texts.items()}


def read(path: Path) -> str | None:
    """Return the text of a file, or None if the file does not exist or is not UTF-8."""
    with _report_errors(path, "read"):
        try:
            return path.read_bytes().decode()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None


def update(path: Path, change: str | Callable[[str | None], str]) -> bool:
    """Lock a file, change its text and replace it. Create its folder if needed. Return True if the text changed.

    ``change`` is the new text, or a function that makes it from the old text. Without a file, the old text is None.
    """
    with _report_errors(path, "written"), _open_draft(path) as draft:
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
def _report_errors(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be {action}: {error.strerror}; give another place with -o") from None


@contextlib.contextmanager
def _open_draft(path: Path) -> Iterator[BinaryIO]:
    """Open and lock the file's temporary draft; renaming the draft replaces the file.

    The draft is also the lock, so that no lock file stays behind. A process that waited for the lock may find its draft
    renamed or removed, and opens a new one. The operating system releases the lock of a killed process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}.draft"

    def is_current(draft: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(draft.fileno()), name.stat())
        except FileNotFoundError:
            return False

    while True:
        with name.open("ab") as draft:
            fcntl.flock(draft, fcntl.LOCK_EX)
            if is_current(draft):
                try:
                    yield draft
                finally:
                    if is_current(draft):
                        name.unlink()
                return
