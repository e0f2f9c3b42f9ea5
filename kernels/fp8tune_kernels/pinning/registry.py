"""Tables that this process has pinned or that still wait for their kernel, and the comparison of both by ranks."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..agreement import Facts, code_hash, hashed, ranks, versions
from ..tuners import function_name, python_function
from .errors import PinError
from .tables import Table

if TYPE_CHECKING:
    from .installed import Pinned

logger = logging.getLogger("fp8tune")
lock = threading.RLock()


@dataclass(frozen=True)
class Entry:
    """A table that was pinned."""

    table: Table
    mode: str
    """What happens for keys that the table lacks."""
    target: Any = None
    """The kernel that was passed; None for the one that the table names."""


entries: dict[str | int, Entry] = {}
"""Name of a kernel, or id of one that was passed -> its table."""
pins: dict[int, Pinned] = {}
"""id of an autotuner or bare kernel -> its table."""
unpinned: dict[tuple[str, str], None] = {}
"""Kernels that were launched with configs of their own: name and reason, in their order."""
from_environment: dict[str, Table] = {}
"""Name of a kernel -> the table that the environment pins it to."""


def waiting() -> list[Table]:
    """Return the tables whose kernels have not been launched."""
    pinned = {item.table.kernel for item in pins.values()}
    return [item.table for item in entries.values() if item.target is None and item.table.kernel not in pinned]


def compare_ranks() -> None:
    """Raise PinError if ranks differ in what they pin. Asks them once."""
    if difference := ranks.compare(_facts):
        fix = "install the same and pin the same tables on all ranks"
        raise PinError(f"{difference[:220]}: {fix}")


def _facts() -> Facts:
    """Return what ranks have to agree on."""
    tables = {id(item.table): (item.table, item.mode, item.target) for item in entries.values()}
    facts = dict(versions())
    for table, mode, target in tables.values():
        name = table.kernel or function_name(target)
        rows = [(device, sorted(map(repr, keys.items()))) for device, keys in sorted(table.devices.items())]
        facts[f"table of {name}"] = hashed(repr(rows))
        facts[f"unknown keys of {name}"] = mode
        file = None if table.kernel else Path(python_function(target).__code__.co_filename)
        facts[f"code of {name}"] = code_hash(name, file)
    return facts
