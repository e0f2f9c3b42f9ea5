"""Pins by the environment variable FP8TUNE_PIN."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import PinError
from .registry import from_environment, logger
from .tables import Table, tables_of
from .watching import pin_all

MODES = ("off", "strict", "nearest", "tune")

STALE = ("unpin", "use")

STALE_VARIABLE = "FP8TUNE_PIN_STALE"
"""Environment variable: replaces ``stale`` of every ``pin``."""

VARIABLE = "FP8TUNE_PIN"
"""Environment variable: ``path[:mode]`` pins a table in every process; a mode alone replaces that of every ``pin``."""


def chosen(table: Any, stale: str) -> list[Table]:
    """Return tables with what is to happen if their kernels have changed. Raises PinError."""
    stale = os.environ.get(STALE_VARIABLE) or stale
    if stale not in STALE:
        raise PinError(f"stale={stale!r:.40}: choose one of {', '.join(STALE)}")
    tables = tables_of(table)
    for item in tables:
        if item.kernel and not item.codes:
            reason = "it cannot be compared with its kernel's code: export it again"
            logger.warning("%s was written by an older fp8tune: %s", item.source, reason)
    return [replace(item, insists=stale == "use") for item in tables]


def pin_from_environment() -> None:
    """Pin the table that ``FP8TUNE_PIN`` names, if it names any and has not been pinned. Raises PinError."""
    variable = os.environ.get(VARIABLE, "")
    if not variable or variable in MODES or from_environment:
        return
    path, _, mode = variable.rpartition(":")
    if not path or mode not in MODES:
        path, mode = variable, "nearest"
    if not Path(path).exists():
        modes = ", ".join(MODES)
        raise PinError(f"{VARIABLE}={variable!r:.150}: no such file or folder; give PATH or PATH:MODE, MODE of {modes}")
    tables = chosen(path, "unpin")
    pin_all(tables, mode, may_lack_modules=True)
    from_environment.update((item.kernel, item) for item in tables)
