"""Tables of a results database, column by column."""

from __future__ import annotations

from sqlalchemy import Column, Table
from sqlalchemy.dialects import sqlite

from fp8tune.store import schema
from fp8tune_reference.markdown import code, needed, prose, sections, table

UNITS = {
    "_gb_per_s": "GB/s",
    "_bytes": "bytes",
    "_us": "us",
    "_share": "share",
    "_mhz": "MHz",
    "_c": "°C",
    "_w": "W",
    "_at": "s since 1970, UTC",
    "_ratio": "ratio",
    "_band": "share",
    "_s": "s",
}
"""End of a column's name -> its unit; the first that fits."""


def part() -> str:
    """Return the sections of all tables, in the order of the schema."""
    return sections(*map(table_section, schema.METADATA.tables.values()))


def table_section(subject: Table) -> str:
    """Return the section of a table.

    Raises:
        UndocumentedError: The table has no text.
    """
    text = prose(needed(subject.info.get("about", ""), f"table {subject.name}"))
    rows = [(code(column.name), _type(column), _unit(column.name), _target(column)) for column in subject.columns]
    return sections(f"## `{subject.name}`", text, table(["column", "type", "unit", "refers to"], rows))


def _type(column: Column[object]) -> str:
    name = str(column.type.compile(dialect=sqlite.dialect()))
    key = "primary key" if column.primary_key else ""
    return ", ".join(filter(None, (f"`{name}`", key, "or null" if column.nullable else "")))


def _unit(name: str) -> str:
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def _target(column: Column[object]) -> str:
    return ", ".join(code(key.column.table.name) for key in column.foreign_keys)
