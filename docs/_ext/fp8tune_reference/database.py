"""The tables and views of a results database, column by column."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache

import sqlalchemy
from sqlalchemy import Column, Connection, Table
from sqlalchemy.dialects import sqlite

from fp8tune import records
from fp8tune.render.fields import UNITS
from fp8tune.store import migrations, schema
from fp8tune.store.meanings import MEANINGS
from fp8tune_reference import docstrings, frames
from fp8tune_reference.markdown import code, needed, prose, sections, sentence, table

OTHER_UNITS = {"_mhz": "MHz", "_c": "°C", "_w": "W", "_at": "s since 1970, UTC", "_ratio": "ratio", "_band": "share"}
"""Units of columns beside those of JSON."""

_RECORD = re.compile(r":class:`fp8tune\.records\.(\w+)`")

FRAMES_OF_VIEWS = {"v_trials": "trials", "v_packed": "trials", "v_picks": "picks", "v_finals": "finals"}
"""A view's columns are named as those of a DataFrame."""


def part() -> str:
    """The views first, which people read; then the tables."""
    views = list(_views())
    tables = [of_table(one) for one in schema.METADATA.tables.values()]
    return sections("## Views" if views else "", *views, "## Tables", *tables)


def of_table(one: Table) -> str:
    """One table. Raises UndocumentedError for it or a column without a text."""
    text = needed(_texts().get(one.name, ""), f"table {one.name}")
    rows = [
        (code(column.name), _type(column), _unit(column.name), prose(meaning(one, column, text)))
        for column in one.columns
    ]
    return sections(f"### `{one.name}`", _described(text), table(["column", "type", "unit", "meaning"], rows))


def _described(text: str) -> str:
    """A table's text; of one that holds a record, what the record is."""
    found = _RECORD.match(text)
    if found is None:
        return sentence(text)
    record, rest = getattr(records, found.group(1)), text[found.end() :].lstrip(" .:,")
    return " ".join(filter(None, (sentence(inspect.cleandoc(record.__doc__).split("\n\n")[0]), sentence(rest))))


def meaning(one: Table, column: Column[object], text: str) -> str:
    """What a column holds. Raises UndocumentedError."""
    reference = next(iter(column.foreign_keys), None)
    if reference is not None:
        return f"the row of `{reference.column.table.name}`"
    return needed(_named(f"{one.name}.{column.name}", _fields(text)), f"column {one.name}.{column.name}")


def _named(name: str, others: Mapping[str, str]) -> str:
    short = name.rpartition(".")[2]
    return MEANINGS.get(name) or MEANINGS.get(short) or others.get(short, "")


def _fields(text: str) -> Mapping[str, str]:
    """Field -> docstring, of the record that a table's docstring names; else of all that are stored in parts."""
    found = _RECORD.search(text)
    named = [getattr(records, found.group(1))] if found else [records.Facts, records.Telemetry, records.FinalsRun]
    return {name: said for record in named for name, said in docstrings.of_attributes(record).items()}


@cache
def _texts() -> Mapping[str, str]:
    """Table -> the docstring of its variable in the schema."""
    texts = docstrings.of_attributes(schema)
    named = {one.name: name for name, one in vars(schema).items() if isinstance(one, Table)}
    return {table: texts.get(name, "") for table, name in named.items()}


def _type(column: Column[object]) -> str:
    kind = str(column.type.compile(dialect=sqlite.dialect()))
    key = "primary key" if column.primary_key else ""
    return ", ".join(filter(None, (f"`{kind}`", key, "or null" if column.nullable else "")))


def _unit(name: str) -> str:
    return next((unit for end, unit in {**OTHER_UNITS, **UNITS}.items() if name.endswith(end)), "")


def _views() -> Iterator[str]:
    """A section for each view that a new database has. Raises UndocumentedError for a column without a text."""
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.begin() as connection:
        migrations.create(connection)
        for name in sqlalchemy.inspect(connection).get_view_names():
            yield of_view(connection, name)


def of_view(connection: Connection, name: str) -> str:
    """One view. Raises UndocumentedError for a column without a text."""
    says = frames.meanings().get(FRAMES_OF_VIEWS.get(name, ""), {})
    rows = [
        (
            code(column),
            "text, UTC" if column.endswith("_at") else _unit(column),
            prose(needed(says.get(column) or _named(column, {}), f"{name}.{column}")),
        )
        for _, column, *_ in connection.exec_driver_sql(f"PRAGMA table_info({name})")
    ]
    return sections(f"### `{name}`", table(["column", "unit", "meaning"], rows))
