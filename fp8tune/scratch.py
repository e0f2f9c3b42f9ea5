"""Temporary folders that no run leaves for good: what a ``kill -9`` leaves behind, the next run removes.

The process that makes a folder holds a lock (``flock``) on it. The kernel gives the lock back however the process ends,
so a folder without one belongs to nobody. Unlike a process id, this also works across containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder(purpose: str) -> Iterator[Path]:
    """Make a temporary folder ``fp8tune-PURPOSE-...``, gone afterwards. Removes those of dead processes first."""
    remove_abandoned(purpose)
    path, lock = _made(purpose)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned(purpose: str) -> None:
    """Remove this user's folders of a purpose that no process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(purpose)}*"):
        with contextlib.suppress(OSError):  # no folder, gone, somebody else's, or locked
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _prefix(purpose: str) -> str:
    return f"fp8tune-{purpose}-"


def _made(purpose: str) -> tuple[Path, int]:
    """Make a folder with its lock. Another run may remove it before it is locked: then the next one is made."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_prefix(purpose)))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks: nobody can tell that nobody holds the folder
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)
