"""The shipped launch tables: generated modules for each arch, which ``fp8tune export`` writes.

``sm_90`` is of the oldest Triton that was measured. From Triton 3.9 on, rows of ``sm_90_triton_3_9`` replace
its rows of the same keys.

:mod:`fp8tune_kernels.runtime.lookup` reads them, after a user's own (:mod:`fp8tune_kernels.runtime.user_tables`).

Each holds ``ROWS``, tuples of: kernel; device name, or ``""`` for any device of the arch; the lookup key's items
sorted by name, or None in a fallback row; the config's items; the place in ``ORIGINS`` of the devices and publications
that the row was chosen on; the place in ``CODES`` of the measured code's hash, if it is known. An axis
that a row leaves out has the kernel's declared default. ``NEAREST`` names the kernels whose unseen keys take the row of
the nearest key before the fallback row.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
import re
import sys
from dataclasses import dataclass, field
from importlib import metadata

Key = tuple[tuple[str, int], ...]
"""The items of a lookup key, sorted by name."""

Row = tuple[str, str, Key | None, tuple[tuple[str, int], ...]]
"""kernel, device name, key items, config items."""


@dataclass(frozen=True)
class Table:
    """Content of a generated module."""

    rows: tuple[Row, ...] = ()
    nearest: tuple[str, ...] = ()
    """Kernels whose unseen keys take the row of the nearest key."""
    origins: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """Devices and publications that each row was chosen on. Lookups do not need them: empty if not read."""
    codes: tuple[str, ...] = field(default=(), compare=False)
    """Hash of the code that each row was measured with, empty if unknown. Shipped rows are not compared at launch."""


@functools.cache
def table(arch: str, triton: str | None = None) -> Table:
    """Return what is shipped for an arch and a version of Triton; empty where there is no table.

    ``triton`` is by default the installed version; the empty text is older than any. A table that cannot be imported
    raises.
    """
    rows, limit = _module(arch), numbers(_installed() if triton is None else triton)
    for version in versions(arch):
        if numbers(version) <= limit:
            rows = overlay(_module(module_name(arch, version)), rows)
    return rows


@functools.cache
def versions(arch: str) -> tuple[str, ...]:
    """Return the versions of Triton from which on other rows are shipped, the oldest first, such as ``3.9``."""
    start = f"{arch}_triton_"
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name.startswith(start)]
    return tuple(sorted((name[len(start) :].replace("_", ".") for name in names), key=numbers))


def checksum(text: str) -> str:
    """Return the hash of a module's data, which follow the line with the hash."""
    data = text.replace("\r\n", "\n").partition("\nCHECKSUM: str = ")[2].partition("\n")[2]
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def module_name(arch: str, triton: str = "") -> str:
    """Return the name of the module that holds the rows of an arch from a version of Triton on."""
    return f"{arch}_triton_{triton.replace('.', '_')}" if triton else arch


def overlay(newer: Table, older: Table) -> Table:
    """Return both as one: a newer row replaces the older ones of its key, on its device or, if it is for all, on all.

    The newer table decides whether unseen keys of a kernel take the nearest row, if it has the kernel's fallback row.
    """
    taken = {(row[0], row[2], row[1]) for row in newer.rows}
    rest = [row for row in older.rows if not {(row[0], row[2], row[1]), (row[0], row[2], "")} & taken]
    decided = {row[0] for row in newer.rows if row[1] == "" and row[2] is None}
    nearest = {*newer.nearest, *(kernel for kernel in older.nearest if kernel not in decided)}
    return Table((*newer.rows, *rest), tuple(sorted(nearest)))


def _module(name: str) -> Table:
    if not re.fullmatch(r"\w+", name):
        return Table()
    name = f"{__name__}.{name}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return Table()
    return Table(tuple(row[:4] for row in module.ROWS), module.NEAREST)


def numbers(version: str) -> tuple[int, ...]:
    """Return (3, 9) for ``3.9.0``: fixes of a release are taken to change no pick."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _installed() -> str:
    """Return the version of Triton, without importing it; empty if it is not installed under that name."""
    if (triton := sys.modules.get("triton")) is not None:
        return str(triton.__version__)
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # some builds for AMD have another; a launch has imported it
        return ""
