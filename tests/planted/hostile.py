"""A spec that prints in every function, in Python and past it, and whose reasons no terminal should get. All wrong.

FAULT 0 wrong bytes · 1 an escape sequence, a lone surrogate and a NUL in its message · 2 the machine's disk is full
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from faults import SPEC as FAULTS

from fp8tune_kernels.spec import NamedInts

print("hostile: imported")


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    print("hostile: problems")
    os.write(1, b"hostile: problems, past Python\n")
    yield NamedInts(M=row["M"], K=row["K"])


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    print("hostile: launch")
    os.write(1, b"hostile: launch, past Python\n")
    if config["FAULT"] == 1:
        raise ValueError("\x1b[2J\udcff\x00[/red] planted")
    if config["FAULT"] == 2:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/planted")
    out[0].zero_()


SPEC = replace(
    FAULTS,
    name="planted-hostile",
    axes={"FAULT": (0, 1)},
    default=NamedInts(FAULT=0),
    problems=problems,
    launch=launch,
)
FULL_DISK = replace(SPEC, name="planted-full-disk", axes={"FAULT": (0, 2)})
