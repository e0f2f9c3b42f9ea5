"""Read the tables that pins are called with: a file of an export, a folder of such files, or a dict."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import PinError, one_line
from .keys import Key


@dataclass(frozen=True)
class Table:
    """Configs of one kernel."""

    source: str
    devices: Mapping[str, Mapping[Key, Any]]
    """Device name, or ``""`` for every device -> key -> arguments of ``triton.Config``."""
    kernel: str = ""
    """``module:attribute``; empty for a dict."""
    names: tuple[str, ...] = ()
    """The arguments of a key."""


def tables_of(table: Any) -> list[Table]:
    """Return what :func:`pin` is called with as a table for each kernel. Raises PinError."""
    if isinstance(table, Mapping):
        return [Table("a dict", {"": table})]
    if not isinstance(table, str | os.PathLike):
        raise PinError(f"{table!r:.80} is no table: give a file of fp8tune export --for python, its folder or a dict")
    if not (path := Path(table)).is_dir():
        return [_read(path)]
    tables: dict[str, Table] = {}
    for file in sorted(path.glob("*.py")):
        if "\nKERNEL = " in file.read_text(encoding="utf-8", errors="replace"):
            read = _read(file)
            before = tables.get(read.kernel, read).devices  # a kernel may have a file for each arch
            tables[read.kernel] = replace(read, devices={**before, **read.devices})
    if not tables:
        raise PinError(f"no table is in {str(path)!r}: write one with fp8tune export --for python")
    return list(tables.values())


def _read(path: Path) -> Table:
    try:
        names = runpy.run_path(str(path))
        if names.get("HAS_OWN_INPUTS"):
            name = names["KERNEL"]
            fix = "call config_for of the file before you make them"
            raise PinError(f"{name} of {path} cannot be pinned, its inputs depend on the config: {fix}")
        if ":" not in names["KERNEL"]:
            reason = f"{path} is of {names['KERNEL']}, which is a specification and no kernel of Triton"
            raise PinError(f"{reason}: call config_for of the file where you launch it")
        return Table(str(path), dict(names["TABLE"]), names["KERNEL"], tuple(names.get("KEY", ())))
    except PinError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{path} is no table that can be read: {one_line(error)}"
        raise PinError(f"{reason}: write one with fp8tune export --for python") from error
