"""Programs of Triton's cache as bytes: what one host has compiled, another one finds compiled.

Triton names the folder of a program in its cache by a hash of code, constants, options, target, compiler and
environment, and by no path. So a program of another host is found exactly where this one would compile the same.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

GROUP = "__grp__"
"""Begins the name of the file that Triton writes last: it has the paths of all others, which are a host's own."""

LEVEL = 1
"""Of compression: a program of ``colwise`` has 580 kB, most of it text, of which 120 are left."""


@dataclass(frozen=True)
class Program:
    """One program of Triton's cache."""

    folder: str
    """The hash."""
    name: str
    """What Triton looks it up by in its folder."""
    files: Mapping[str, bytes]
    """Name -> compressed content, of all that belongs to it."""


def new(known: set[str]) -> Iterator[Program]:
    """Whole programs in this process's cache whose folders are not in ``known``, which gets them."""
    from triton import knobs

    for group in sorted(Path(knobs.cache.dir).glob(f"*/{GROUP}*")):
        if group.parent.name not in known:
            known.add(group.parent.name)
            with contextlib.suppress(OSError):  # somebody clears the cache: it is compiled where it is missed
                names = json.loads(group.read_text())["child_paths"]
                files = {name: zlib.compress((group.parent / name).read_bytes(), LEVEL) for name in names}
                yield Program(group.parent.name, group.name.removeprefix(GROUP), files)


def keep(programs: Iterable[Program]) -> int:
    """Put programs into this process's cache. Returns how many it did not have."""
    from triton.runtime.cache import FileCacheManager

    kept = 0
    for program in programs:
        cache = FileCacheManager(program.folder)
        if not cache.has_file(f"{GROUP}{program.name}"):
            paths = {name: cache.put(zlib.decompress(content), name) for name, content in program.files.items()}
            cache.put_group(program.name, paths)
            kept += 1
    return kept
