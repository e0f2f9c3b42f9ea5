"""Building blocks of a report: pages of parts, each a table with an optional chart of the same rows.

They contain neither HTML nor SVG: :mod:`.page` writes all pages into one file, :mod:`.figures` each chart into its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

Chart: TypeAlias = Any  # altair's chained methods are untyped, and importing it takes a second

R = TypeVar("R")

Value = str | int | float | bool | None

DIGITS = 5  # significant digits of a number: times repeat to three


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column of a table, and the name by which a chart reads it."""

    name: str
    title: str
    value: Callable[[R], Value]
    digits: int | None = None
    """Decimals printed in the table; None prints the number as it is."""
    link: str = ""
    """Name of the column that holds the link of each cell."""
    is_hidden: bool = False
    """True if only the chart reads the column."""
    unit: str = ""
    """Text appended to a number in the table, such as ``x``."""


@dataclass(frozen=True, eq=False)
class Table:
    """Values of rows, under columns."""

    columns: tuple[Column[object], ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    """Description of rows that were left out; empty if all are here."""

    def records(self) -> list[dict[str, Value]]:
        """Return each row as a mapping from column names, as charts take them."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


def table(columns: Sequence[Column[R]], items: Iterable[R], note: str = "") -> Table:
    """Build a table with one row per item."""
    values = [tuple(_rounded(column.value(item)) for column in columns) for item in items]
    return Table(tuple(columns), tuple(values), note)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Part:
    """A table, with or without a chart."""

    id: str
    """Word that is unique on its page, for links and file names."""
    title: str
    text: str
    """Explanation for a reader who sees the chart for the first time."""
    table: Table
    chart: Chart | None = None
    """Altair chart that reads its rows from the data set :data:`ROWS`."""
    empty: str = "Nothing here."
    """Text shown in place of an empty table."""


@dataclass(frozen=True, eq=False)
class Page:
    """One page of a report. ``facts`` are names and values listed above its parts."""

    id: str
    title: str
    text: str
    parts: tuple[Part, ...]
    facts: tuple[tuple[str, str], ...] = field(default=())


ROWS = "rows"


def percent(share: float | None) -> float | None:
    """Return a share in percent."""
    return None if share is None else 100 * share


def _rounded(value: Value) -> Value:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
