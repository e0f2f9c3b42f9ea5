"""The shipped launch tables: one generated module an arch, which ``fp8tune export`` writes.

:mod:`fp8tune_kernels.runtime.lookup` reads them, after a user's own (:mod:`fp8tune_kernels.runtime.user_tables`).

Each holds ``ROWS``, tuples of: kernel; device name, or ``""`` for any device of the arch; the lookup key's items
sorted by name, or None in a fallback row; the config's items; the place in ``ORIGINS`` of the devices and publications
that the row was chosen on. An axis that a row leaves out has the kernel's declared default. ``NEAREST`` names the
kernels whose unseen keys take the row of the nearest key before the fallback row.
"""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass, field

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


@functools.cache
def table(arch: str) -> Table:
    """Return what is shipped for an arch; empty where there is no table. A table that cannot be imported raises."""
    name = f"{__name__}.{arch}"
    if not re.fullmatch(r"\w+", arch):
        return Table()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return Table()
    return Table(tuple(row[:4] for row in module.ROWS), module.NEAREST)
