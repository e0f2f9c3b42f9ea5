"""A user's own launch tables, read before those that are shipped; ``fp8tune export`` writes them outside of a checkout.

A file is named and written like the shipped module of its arch, but is not imported: nothing in it runs.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import warnings
from pathlib import Path

from ..spec import KernelSpec
from ..tables import Row, Table, overlay, table

FOLDER_VARIABLE = "FP8TUNE_TABLES"
"""The environment variable that names the folder; if it is set and empty, there is none."""


def folder() -> Path | None:
    """Return the folder of a user's tables: that of the variable, else in the data folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named).absolute() if named else None
    data = os.environ.get("XDG_DATA_HOME", "")
    home = Path(data) if os.path.isabs(data) else Path(os.path.expanduser("~/.local/share"))
    return home / "fp8tune" / "tables"


@functools.cache
def user_table(arch: str) -> Table:
    """The user's table of an arch, read once; empty if there is none. Raises ValueError if the file is no table."""
    where = folder()
    if where is None or not re.fullmatch(r"\w+", arch):
        return Table()
    path = where / f"{arch}.py"
    try:
        text = path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return Table()
    except OSError as error:  # such as the home folder of another user
        warnings.warn(f"{path} cannot be read, the shipped table is used: {error.strerror}", stacklevel=2)
        return Table()
    try:
        return parsed(text)
    except ValueError as error:
        raise ValueError(f"{path} is no table, {error}: remove it, or write it with fp8tune export") from None


def parsed(text: str) -> Table:
    """The rows of a generated module, from its text alone. Raises ValueError for any other text."""
    try:
        values = {
            statement.target.id: ast.literal_eval(statement.value)
            for statement in ast.parse(text).body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value
        }
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError("it is not what fp8tune export writes") from None
    nearest, origins, rows = (values.get(name) for name in ("NEAREST", "ORIGINS", "ROWS"))
    if not isinstance(rows, tuple) or not isinstance(nearest, tuple) or not isinstance(origins, tuple):
        raise ValueError("it has no ROWS")
    if wrong := [row for row in rows if not _is_row(row, len(origins))]:
        raise ValueError(f"{str(wrong[0])[:80]!r} is no row")
    if not all(isinstance(names, tuple) and {*map(type, names)} <= {str} for names in (nearest, *origins)):
        raise ValueError("NEAREST or ORIGINS holds no names")
    return Table(tuple(row[:4] for row in rows), nearest, tuple(origins[row[4]] for row in rows))


def _is_row(row: object, places: int) -> bool:
    match row:
        case (str(), str(), tuple() | None as key, tuple() as config, int() as place):
            pairs = all(
                isinstance(item, tuple) and [*map(type, item)] == [str, int] for item in (*(key or ()), *config)
            )
            return pairs and 0 <= place < places
    return False


def installed(arch: str, triton: str | None = None) -> Table:
    """The user's table over the shipped one for a version of Triton, by default of the installed one."""
    return overlay(user_table(arch), table(arch, triton))


def of_kernel(spec: KernelSpec, own: Table) -> Table:
    """The rows whose configs a kernel can launch: the user's table may be older than the kernel."""

    def fits(row: Row) -> bool:
        sizes = set(spec.key) if row[2] is None else {name for name, _ in row[2]}
        return {name for name, _ in row[3]} <= set(spec.axes) and sizes == set(spec.key)

    rows = [row for row in own.rows if row[0] == spec.name]
    usable = tuple(filter(fits, rows))
    if left_out := len(rows) - len(usable):
        warnings.warn(
            f"{left_out} rows of {spec.name} in {folder()} are of another version of the kernel and are "
            "left out: run fp8tune sweep and fp8tune export again",
            stacklevel=2,
        )
    return Table(usable, own.nearest)
