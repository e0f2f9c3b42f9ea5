"""A user's own launch tables, read before those that are shipped; ``fp8tune export`` writes them outside of a checkout.

A file is named and written like the shipped module of its arch, but is not imported: nothing in it runs.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import warnings
from importlib.metadata import entry_points
from pathlib import Path

from ..identity import UnknownCodeError, code_hash
from ..spec import KernelSpec
from ..tables import Row, Table, checksum, overlay, table

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
        own = parsed(text)
    except ValueError as error:
        raise ValueError(f"{path} is no table, {error}: remove it, or write it with fp8tune export") from None
    if own.rows and not any(own.codes):
        reason = "was written by an older fp8tune, and cannot be compared with the code of the kernels"
        warnings.warn(f"{path} {reason}: write it again with fp8tune export", stacklevel=2)
    return own


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
    if "CHECKSUM" in values and values["CHECKSUM"] != checksum(text):
        raise ValueError("it is damaged or was edited, its checksum is another")
    nearest, origins, rows = (values.get(name) for name in ("NEAREST", "ORIGINS", "ROWS"))
    codes = values.get("CODES", ())
    if not isinstance(rows, tuple) or not isinstance(nearest, tuple) or not isinstance(origins, tuple):
        raise ValueError("it has no ROWS")
    if not isinstance(codes, tuple) or not {*map(type, codes)} <= {str}:
        raise ValueError("CODES holds no hashes")
    if wrong := [row for row in rows if not _is_row(row, len(origins), len(codes))]:
        raise ValueError(f"{str(wrong[0])[:80]!r} is no row")
    if not all(isinstance(names, tuple) and {*map(type, names)} <= {str} for names in (nearest, *origins)):
        raise ValueError("NEAREST or ORIGINS holds no names")
    return Table(
        tuple(row[:4] for row in rows),
        nearest,
        tuple(origins[row[4]] for row in rows),
        tuple(codes[row[5]] if len(row) > 5 else "" for row in rows),
    )


def _is_row(row: object, origins: int, codes: int) -> bool:
    match row:
        case (str(), str(), tuple() | None as key, tuple() as config, int() as place, *rest):
            pairs = all(
                isinstance(item, tuple) and [*map(type, item)] == [str, int] for item in (*(key or ()), *config)
            )
            return pairs and 0 <= place < origins and (not rest or rest in [[code] for code in range(codes)])
    return False


def installed(arch: str, triton: str | None = None) -> Table:
    """The user's table over the shipped one for a version of Triton, by default of the installed one."""
    return overlay(user_table(arch), table(arch, triton))


@functools.cache
def _code_of(kernel: str) -> str:
    """Return the hash of a kernel's code as it is now; empty where there is no source of it."""
    for point in entry_points(group="fp8tune.kernels", name=kernel):
        with contextlib.suppress(UnknownCodeError):
            return code_hash(point.value)
    return ""


def of_kernel(spec: KernelSpec, own: Table) -> Table:
    """The rows whose configs a kernel can launch: the user's table may be older than the kernel."""

    def fits(row: Row) -> bool:
        sizes = set(spec.key) if row[2] is None else {name for name, _ in row[2]}
        return {name for name, _ in row[3]} <= set(spec.axes) and sizes == set(spec.key)

    places = [place for place, row in enumerate(own.rows) if row[0] == spec.name]
    code = _code_of(spec.name) if any(own.codes[place] for place in places if own.codes) else ""
    current = [place for place in places if not code or own.codes[place] in ("", code)]
    usable = [own.rows[place] for place in current if fits(own.rows[place])]
    reasons = {"other code": len(places) - len(current), "another version": len(current) - len(usable)}
    for reason, count in reasons.items():
        if count:
            warnings.warn(
                f"{count} rows of {spec.name} in {folder()} are of {reason} of the kernel and are "
                "left out: run fp8tune sweep and fp8tune export again",
                stacklevel=2,
            )
    return Table(tuple(usable), own.nearest)
