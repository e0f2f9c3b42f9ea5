"""Hashes on disk, so that the first launch of a kernel reads no source.

An entry holds where each module was found and the state of its file. It counts as long as they are found there again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .code import digest
from .modules import Finder

SETTLED_S = 2.0  # a file that was changed later may be changed again within the resolution of its times


def cached(subject: tuple[str, ...], finder: Finder, compute: Callable[[], str]) -> str:
    """Return the hash of a subject as it was stored, if all files are as they were, else as it is computed now."""
    start_s = time.time()
    sources = [path.stat() for path in sorted(Path(__file__).parent.glob("*.py"))]  # another version hashes otherwise
    own = [(state.st_size, state.st_mtime_ns) for state in sources]
    key = json.dumps([subject, finder.path, sys.version_info[:2], own])
    folder = _folder()
    path = folder / f"{digest(key.encode())}.json" if folder else None
    known = _read(path) if path else None
    if known is not None and all(_plain(finder, name) == place for name, place in known[1].items()):
        return known[0]
    result = compute()
    places = {name: _plain(finder, name) for name in finder.places}
    newest_ns = max((time_ns for place in finder.places.values() if place for time_ns in place.state[1:3]), default=0)
    if path and finder.is_complete and newest_ns < (start_s - SETTLED_S) * 1e9:
        _write(path, json.dumps([result, places]))
    return result


def _folder() -> Path | None:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "fp8tune" / "code"
    except RuntimeError:  # there is no home
        return None


def _plain(finder: Finder, name: str) -> object:
    """Return a place as JSON has it."""
    place = finder.find(name)
    return None if place is None else [place.file, place.folders and [*place.folders], place.has_source, [*place.state]]


def _read(path: Path) -> tuple[str, dict[str, object]] | None:
    """Return an entry; None if there is none, or a damaged one."""
    try:
        result, places = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    is_whole = isinstance(result, str) and len(result) == 16 and isinstance(places, dict)
    return (result, places) if is_whole else None


def _write(path: Path, text: str) -> None:
    """Write an entry in one step; a full or read-only disk does no harm."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            file = Path(folder, path.name)
            file.write_text(text, encoding="utf-8")
            file.replace(path)
