"""Pins by the environment variable FP8TUNE_PIN."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import PinError
from .registry import from_environment
from .tables import tables_of
from .watching import pin_all

MODES = ("off", "strict", "nearest", "tune")

VARIABLE = "FP8TUNE_PIN"
"""Environment variable: ``path[:mode]`` pins a table in every process; a mode alone replaces that of every ``pin``."""


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
    tables = tables_of(path)
    pin_all(tables, mode, may_lack_modules=True)
    from_environment.update((item.kernel, item) for item in tables)
