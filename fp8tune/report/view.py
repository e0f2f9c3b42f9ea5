"""What a report is made of: views of parts, each a table and perhaps a picture of the same rows.

A view knows neither HTML nor SVG: :mod:`.page` writes all views into one file, :mod:`.figures` each picture into its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

Picture: TypeAlias = Any
"""A chart of altair, of any kind: its methods are untyped where they are chained, and importing it takes a second."""

R = TypeVar("R")

Value = str | int | float | bool | None

DIGITS = 5
"""Significant digits of a number in a report: times repeat to three."""


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column of a table, and the name by which a picture reads it."""

    name: str
    title: str
    value: Callable[[R], Value]
    digits: int | None = None
    """Decimals that the table prints of a number; None: as it is."""
    link: str = ""
    """The name of the column with the address that a cell leads to."""
    is_hidden: bool = False
    """Whether only the picture reads it."""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows under columns, as values."""

    columns: tuple[Column[object], ...]
    rows: tuple[tuple[Value, ...], ...]
    left_out: str = ""
    """What was left out, and why; empty for nothing."""

    def named(self) -> list[dict[str, Value]]:
        """Each row by the names of its columns, as a picture takes it."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


def table(columns: Sequence[Column[R]], items: Iterable[R], left_out: str = "") -> Table:
    """A row an item."""
    every = list(items)
    values = [[_rounded(value) for value in map(column.value, every)] for column in columns]
    return Table(tuple(columns), tuple(zip(*values, strict=True)), left_out)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Part:
    """A picture and its table, or a table alone."""

    id: str
    """Unique in its view: a word for links and the names of files."""
    title: str
    says: str
    """What it shows and how to read it, for someone who sees it for the first time."""
    table: Table
    chart: Picture | None = None
    """Reads the rows by the name :data:`ROWS`; None for a table alone."""
    empty: str = "Nothing here."
    """What stands in the place of no rows."""


@dataclass(frozen=True, eq=False)
class View:
    """One page of a report."""

    id: str
    title: str
    says: str
    parts: tuple[Part, ...]
    facts: tuple[tuple[str, str], ...] = field(default=())
    """Name and value of what is known of its subject."""


ROWS = "rows"
"""The name of the rows in a picture."""


def _rounded(value: Value) -> Value:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
