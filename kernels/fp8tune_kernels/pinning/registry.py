"""What this process has pinned and what still waits for its kernel, and the comparison of both by ranks."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..agreement import Facts, code_hash, hashed, ranks, versions
from ..tuners import function_name, python_function
from .errors import PinError
from .tables import Table

if TYPE_CHECKING:
    from .installed import Pinned

logger = logging.getLogger("fp8tune")
lock = threading.RLock()

pins: dict[int, Pinned] = {}
"""id of an autotuner or bare kernel -> its table."""
waiting: dict[str, tuple[Table, str]] = {}
"""Name of a kernel that did not exist when it was pinned -> its table, and the mode for unknown keys."""
from_environment: dict[str, Table] = {}
"""Name of a kernel -> the table that the environment pins it to."""


def compare_ranks() -> None:
    """Raise PinError if ranks differ in what they pin. Asks them once."""
    if difference := ranks.compare(_facts):
        fix = "install the same and pin the same tables on all ranks"
        raise PinError(f"{difference[:220]}: {fix}")


def _facts() -> Facts:
    """Return what ranks have to agree on."""
    entries = {id(table): (table, mode, None) for table, mode in waiting.values()}
    entries |= {id(item.table): (item.table, item.mode, item.target) for item in pins.values()}
    facts = dict(versions())
    for table, mode, target in entries.values():
        name = table.kernel or function_name(target)
        rows = [(device, sorted(map(repr, keys.items()))) for device, keys in sorted(table.devices.items())]
        facts[f"table of {name}"] = hashed(repr(rows))
        facts[f"unknown keys of {name}"] = mode
        file = None if table.kernel else Path(python_function(target).__code__.co_filename)
        facts[f"code of {name}"] = code_hash(name, file)
    return facts
