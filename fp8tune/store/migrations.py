"""How a database of an older fp8tune gets today's tables: steps in order, each applied once and recorded.

All missing steps run in one transaction, so a step that fails leaves the file as it was. A step tests what is there.
Tables that a database lacks altogether are made at the end.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Dialect,
    String,
    Table,
    insert,
    inspect,
    select,
    text,
    type_coerce,
    update,
)
from sqlalchemy.schema import CreateIndex, CreateTable

from fp8tune.errors import DatabaseError
from fp8tune.redaction import redacted
from fp8tune.store import views
from fp8tune.store.schema import METADATA, Codes, Devices, Finals, Meta, Migrations, Sweeps, Trials

RENAMED_HASHES = Path(__file__).with_name("renamed_hashes.txt")


def create(connection: Connection) -> None:
    """Make all tables and views in an empty database."""
    for statement in _statements(connection.dialect):
        connection.exec_driver_sql(statement)
    views.create(connection)
    _record(connection, MIGRATIONS)


@functools.lru_cache(2)  # all files share a dialect; SQLAlchemy itself writes 40 statements anew for each database
def _statements(dialect: Dialect) -> tuple[str, ...]:
    """What makes the tables and their indexes."""
    tables = METADATA.sorted_tables
    indexes = [index for table in tables for index in table.indexes]
    made: list[CreateTable | CreateIndex] = [*map(CreateTable, tables), *map(CreateIndex, indexes)]
    return tuple(str(each.compile(dialect=dialect)) for each in made)


def version(connection: Connection) -> int:
    """The schema that a database says it has. Raises DatabaseError where it says none."""
    stated = connection.execute(select(Meta.c.value).where(Meta.c.name == "schema_version")).scalar()
    if not re.fullmatch("[0-9]{1,9}", str(stated)):
        raise DatabaseError(f"the database states no schema version ({stated!r:.80}): it was not written by fp8tune")
    return int(str(stated))


def migrate(connection: Connection) -> None:
    """Apply the steps that a database lacks, within the caller's transaction."""
    applied: set[str] = set()
    if inspect(connection).has_table(Migrations.name):
        applied.update(connection.execute(select(Migrations.c.name)).scalars())
    missing = {name: step for name, step in MIGRATIONS.items() if name not in applied}
    views.drop(connection)  # a table that a view names cannot lose a column
    for step in missing.values():
        step(connection)
    METADATA.create_all(connection)
    views.create(connection)
    _record(connection, missing)


def _record(connection: Connection, names: Mapping[str, object]) -> None:
    connection.execute(text("DELETE FROM meta WHERE name = 'schema_version'"))
    connection.execute(insert(Meta).values(name="schema_version", value=str(SCHEMA_VERSION)))
    if names:
        connection.execute(insert(Migrations), [{"name": name, "applied_at": time.time()} for name in names])


def _columns(connection: Connection, table: str) -> set[str]:
    """The names of a table's columns; none where there is no such table."""
    there = inspect(connection)
    return {column["name"] for column in there.get_columns(table)} if there.has_table(table) else set()


def _add_round_to_the_index(connection: Connection) -> None:
    """The first databases had an index without it, and ranking reads nothing but the index."""
    (summary,) = Trials.indexes
    stored = {index["name"]: index["column_names"] for index in inspect(connection).get_indexes(Trials.name)}
    if stored.get(summary.name) != [column.name for column in summary.columns]:
        summary.drop(connection, checkfirst=True)
        summary.create(connection)


def _remove_passwords(connection: Connection) -> None:
    """Commands were stored as they were typed. SQLite writes zeros over them."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
    stored = select(Sweeps.c.id, type_coerce(Sweeps.c.command, String)).where(Sweeps.c.command.contains("://"))
    for id, command in connection.execute(stored).all():
        if redacted(command) != command:
            connection.execute(update(Sweeps).where(Sweeps.c.id == id).values(command=command))


def _rename_judges(connection: Connection) -> None:
    if _columns(connection, "judges") and not _columns(connection, "references_checked"):
        connection.execute(text("ALTER TABLE judges RENAME TO references_checked"))


def _rename_hashes(section: str, connection: Connection) -> None:
    """Code that was moved, and launches the same, keeps its rows, unless there are rows of the new hash, too."""
    of = "FROM kernel_versions WHERE kernel = :kernel AND source_hash = :new"
    versions = "UPDATE kernel_versions SET source_hash = :new WHERE kernel = :kernel AND source_hash = :old"
    versions += f" AND NOT EXISTS (SELECT 1 {of})"
    references = "UPDATE references_checked SET reference = :new WHERE reference = :old"
    has_references = bool(_columns(connection, "references_checked"))
    for kernel, old, new in renamed_hashes(section):
        if kernel != "reference":
            connection.execute(text(versions), {"kernel": kernel, "old": old, "new": new})
        elif has_references:
            connection.execute(text(references), {"old": old, "new": new})


def renamed_hashes(section: str) -> list[tuple[str, str, str]]:
    """(kernel or ``reference``, old hash, new hash) of one section of :data:`RENAMED_HASHES`."""
    _, _, rest = RENAMED_HASHES.read_text().partition(f"[{section}]\n")
    lines = rest.partition("[")[0].splitlines()
    return [(kernel, old, new) for kernel, old, new in (line.split() for line in lines if line)]


def _rename_stage(connection: Connection) -> None:
    connection.execute(text("UPDATE trials SET stage = 'duplicate' WHERE stage = 'twin'"))


def _drop_columns(table: Table, connection: Connection) -> None:
    """Those that nothing reads any more."""
    for name in sorted(_columns(connection, table.name) - set(table.c.keys())):
        connection.execute(text(f'ALTER TABLE {table.name} DROP COLUMN "{name}"'))


def _add_nothing(connection: Connection) -> None:
    """The table is made with all others; an older fp8tune would read a compacted database as if it were empty."""


def _add_timing_and_codegen(connection: Connection) -> None:
    """Rows until 0.2 were timed by events alone, and compiled with FP fusion, the default of Triton up to 3.9.

    The columns are part of what makes a device unique, which SQLite changes in a new table only. Picks go with the old
    one: they are decided again.
    """
    if "timing" in _columns(connection, "devices"):
        return
    was_timed = "CASE WHEN uuid_hash = '' THEN '' ELSE '{}' END"
    columns = [column.name for column in Devices.c if column.name not in ("timing", "codegen")]
    query = f"SELECT {', '.join(columns)}, {was_timed.format('events')} AS timing, "
    rows = (
        connection.execute(text(f"{query}{was_timed.format('fp_fusion=1')} AS codegen FROM devices")).mappings().all()
    )
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(
            "PRAGMA defer_foreign_keys=ON"
        )  # all that refers to a device does so again at the end
        connection.exec_driver_sql("DELETE FROM devices")
        connection.exec_driver_sql("DROP TABLE devices")
        Devices.create(connection)
        if rows:
            connection.execute(insert(Devices), [dict(row) for row in rows])
        return
    for name in ("timing", "codegen"):
        connection.execute(text(f"ALTER TABLE devices ADD COLUMN {name} VARCHAR NOT NULL DEFAULT ''"))
    for row in rows:
        connection.execute(
            update(Devices).where(Devices.c.id == row["id"]).values(timing=row["timing"], codegen=row["codegen"])
        )
    for constraint in inspect(connection).get_unique_constraints("devices"):
        connection.execute(text(f'ALTER TABLE devices DROP CONSTRAINT "{constraint["name"]}"'))
    names = ", ".join([*columns[1:], "timing", "codegen"])  # as text: AddConstraint would take it out of later tables
    connection.execute(text(f"ALTER TABLE devices ADD UNIQUE ({names})"))


def _decide_again(connection: Connection) -> None:
    """Drop picks, which have no config of today: they are derived from rows, and decided again by the next command."""
    connection.execute(text("DROP TABLE IF EXISTS picks"))
    connection.execute(text("DELETE FROM meta WHERE name = 'picks decided by'"))


MIGRATIONS: dict[str, Callable[[Connection], Any]] = {
    "round in the index": _add_round_to_the_index,
    "commands without passwords": _remove_passwords,
    "judges become references_checked": _rename_judges,
    "source hashes without names": partial(_rename_hashes, "source hashes without names"),
    "stage duplicate": _rename_stage,
    "finals without replaces": partial(_drop_columns, Finals),
    "codes without what ranked configs": partial(_drop_columns, Codes),
    "source hashes of kernels that take an alignment": partial(
        _rename_hashes, "source hashes of kernels that take an alignment"
    ),
    "trials may be packed": _add_nothing,
    "devices have timing and codegen": _add_timing_and_codegen,
    "picks have the config of today": _decide_again,
}
"""In the order in which they are applied. A name is what databases record: it never changes."""

SCHEMA_VERSION = 1 + len(MIGRATIONS)
"""What ``meta`` says: an older fp8tune refuses a database that it would misread."""
