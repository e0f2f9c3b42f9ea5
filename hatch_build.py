"""Builds ``fp8tune/_results.db``, the rows that an installed fp8tune reads as its base, from ``results.db``.

Kept is all that ranking reads: every config with its times, what failed and why. Left out are samples, clocks and
compile times, which take most of the file. Needs the standard library alone: a build environment has no SQLAlchemy.

The sdist carries the reduced file too, not ``results.db``: it is a fraction of the size, and a wheel that pip builds
from the sdist has the same bytes as the one that was released.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMITTED = "results.db"
REDUCED = "fp8tune/_results.db"

LEFT_OUT = {
    "samples": "x''",
    "tick_us": "NULL",
    "sm_clock_mhz": "NULL",
    "memory_clock_mhz": "NULL",
    "temperature_c": "NULL",
    "power_w": "NULL",
    "throttle_reasons": "NULL",
    "compile_s": "NULL",
    "position": "0",
}
"""Column of any table -> the SQL value that stands for what is left out; readers take it for not recorded."""

MADE = {"created_at": "CAST(created_at AS INTEGER)", "columns": "without_left_out(columns)"}
"""Column of any table -> the SQL value that says as much in less: whole seconds, packed trials without what is left
out."""

CLUSTERED = {"trials": "candidate_id"}
"""Table -> what ranking reads it by. Rows stored in that order need no index, which would be as large again."""


class ResultsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the reduced file to wheels and sdists; an editable installation reads ``results.db`` itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the file; of an sdist, take the one that it carries."""
        if version == "editable":
            return
        committed, carried = Path(self.root, COMMITTED), Path(self.root, REDUCED)
        if committed.is_file():
            self._folder = tempfile.TemporaryDirectory(prefix="fp8tune-build-")
            carried = Path(self._folder.name, carried.name)
            try:
                reduce(committed, carried)
            except sqlite3.Error as error:
                self.app.abort(f"{committed} cannot be read ({error}): run fp8tune doctor --repair --db {COMMITTED}")
        if carried.is_file():
            build_data["force_include"][str(carried)] = REDUCED
        else:
            self.app.display_warning(f"no {COMMITTED} here: the {self.target_name} is built without rows")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file that was made."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def reduce(source: Path, into: Path) -> None:
    """Write what ranking reads of a results database into a new file: the same bytes for the same rows and SQLite."""
    uri = f"file:{quote(str(source.absolute()))}?mode=ro"
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(into.absolute()))}", uri=True)) as connection:
        connection.isolation_level = None
        connection.create_function("without_left_out", 1, without_left_out, deterministic=True)
        connection.execute("PRAGMA journal_mode = OFF")  # a build that breaks off begins anew
        connection.execute("ATTACH ? AS source", (uri,))
        connection.execute("BEGIN")
        for table in _named(connection, "table"):
            _copy(connection, table)
        for (view,) in connection.execute("SELECT sql FROM source.sqlite_master WHERE type = 'view' ORDER BY name"):
            connection.execute(view)
        connection.execute("COMMIT")
        connection.execute("DETACH source")
        connection.execute("VACUUM")


def _named(connection: sqlite3.Connection, type: str) -> Iterator[str]:
    query = "SELECT name FROM source.sqlite_master WHERE type = ? AND name NOT LIKE 'sqlite_%' ORDER BY name"
    return (name for (name,) in connection.execute(query, (type,)).fetchall())


def _copy(connection: sqlite3.Connection, table: str) -> None:
    """Copy a table without its indexes and constraints, which serve writers: nobody writes into the base."""
    columns = connection.execute(f'PRAGMA source.table_info("{table}")').fetchall()
    names = [name for _, name, *_ in columns]
    declared = [f'"{name}" {type}' for _, name, type, *_ in columns]
    order, options = '"id"' if "id" in names else "1", ""
    if table in CLUSTERED:
        order = f'"{CLUSTERED[table]}", "id"'
        declared, options = [*declared, f"PRIMARY KEY ({order})"], " WITHOUT ROWID"
    elif "id" in names:
        declared[names.index("id")] += " PRIMARY KEY"
    connection.execute(f'CREATE TABLE "{table}" ({", ".join(declared)}){options}')
    values = ", ".join(LEFT_OUT.get(name) or MADE.get(name) or f'"{name}"' for name in names)
    connection.execute(f'INSERT INTO "{table}" SELECT {values} FROM source."{table}" ORDER BY {order}')


def without_left_out(packed: bytes) -> bytes:
    """Packed trials (see ``fp8tune/store/packing.py``) without the columns that are left out; ``position`` stays.

    The first line lists the columns, each with how many bytes it takes of the rest: bits of what is missing, then
    ``count`` numbers of ``width`` bytes, or of 8 in form ``r``.
    """
    text = zlib.decompress(packed)
    start = text.index(b"\n") + 1
    heads, bodies = [], []
    for head in json.loads(text[:start]):
        name, form, _, width, count, nulls, _ = head
        end = start + -(-nulls // 8) + count * (8 if form == "r" else width)
        if LEFT_OUT.get(name.rpartition(".")[2]) != "NULL":
            heads.append(head)
            bodies.append(text[start:end])
        start = end
    line = json.dumps(heads, separators=(",", ":")).encode() + b"\n"
    return zlib.compress(line + b"".join(bodies), 9)
