"""Base of the JSON documents. JSON, CSV, the schema and the reference page come from these models alone."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Self, Unpack

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fp8tune.text import quoted_formula, visible


def value(meaning: str, unit: str = "", **options: Any) -> Any:
    """Declare a field by one sentence and its unit. Shares are fractions: 0.01 is 1 %."""
    return Field(description=meaning, json_schema_extra={"unit": unit}, **options)


class Document(BaseModel):
    """Base of all documents: immutable, and without fields that are not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    printed_by: ClassVar[str] = ""
    """Command that prints the document, such as ``show KERNEL``; empty for parts of others."""

    def __init_subclass__(cls, printed_by: str = "", **settings: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**settings)
        cls.printed_by = printed_by

    @classmethod
    def from_records(cls, *records: object, **values: Any) -> Self:
        """Return a document of values, and of the records' attributes that have the names of fields."""
        for record in records:
            names = [name for name in cls.model_fields if name not in values and hasattr(record, name)]
            values |= {name: getattr(record, name) for name in names}
        return cls.model_validate(values)

    @model_validator(mode="before")
    @classmethod
    def _printable(cls, values: Any) -> Any:
        # Names of files and databases may hold control characters or lone surrogates, and JSON has no infinity.
        return {name: _printable(value) for name, value in values.items()} if isinstance(values, dict) else values


def _printable(value: object) -> object:
    if isinstance(value, str):
        return visible(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(document: Document) -> dict[str, Any]:
    """Return a document as plain values of JSON."""
    return document.model_dump(mode="json")


def print_json_line(document: Document) -> None:
    """Print a document as one line of JSON, at once."""
    print(json.dumps(plain(document)), flush=True)


def print_csv(document: Document) -> None:
    """Print the rows of a document as CSV: its list of documents. Mappings become ``NAME=VALUE`` pairs."""
    lists = (rows for rows in vars(document).values() if isinstance(rows, list))
    rows = next((rows for rows in lists if rows and isinstance(rows[0], Document)), [])
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for place, row in enumerate(rows):
        if not place:
            writer.writerow(type(row).model_fields)
        writer.writerow(map(_cell, plain(row).values()))


def _cell(value: object) -> object:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items())
    if isinstance(value, bool | list):
        return json.dumps(value)
    return quoted_formula(value) if isinstance(value, str) else value
