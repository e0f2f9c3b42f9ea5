"""Programs of Triton's cache as bytes, so that one host finds compiled what another host has compiled.

Triton names the folder of a program by a hash of code, constants, options, target, compiler and environment, and by no
path. So a program of another host is found exactly where this one would compile the same.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8tune.replay.lazy import triton

GROUP = "__grp__"  # prefix of the file that Triton writes last: it has the paths of all others, other on each host
LEVEL = 1  # level of compression: a program of ``colwise`` has 580 kB, most of it text, of which 120 are left


@dataclass(frozen=True)
class Program:
    """One program of Triton's cache."""

    folder: str  # the hash
    name: str  # name by which Triton looks it up in its folder
    files: Mapping[str, bytes]  # name -> compressed content


def new(known: set[str]) -> Iterator[Program]:
    """Yield whole programs in this process's cache whose folders are not in ``known``, and add those."""
    for group in sorted(Path(triton.knobs.cache.dir).glob(f"*/{GROUP}*")):
        if group.parent.name not in known:
            known.add(group.parent.name)
            with contextlib.suppress(OSError):  # the cache is being cleared: the program is compiled when it is needed
                names = json.loads(group.read_text())["child_paths"]
                files = {name: zlib.compress((group.parent / name).read_bytes(), LEVEL) for name in names}
                yield Program(group.parent.name, group.name.removeprefix(GROUP), files)


def keep(programs: Iterable[Program]) -> int:
    """Put programs into this process's cache. Return how many it did not have."""
    added = 0
    for program in programs:
        cache = triton.runtime.cache.FileCacheManager(program.folder)
        if not cache.has_file(f"{GROUP}{program.name}"):
            paths = {name: cache.put(zlib.decompress(content), name) for name, content in program.files.items()}
            cache.put_group(program.name, paths)
            added += 1
    return added
