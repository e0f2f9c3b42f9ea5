"""Base of the JSON documents. One model declares a document: JSON, CSV, the schema and the reference page follow.

A field also says where a record has it, so that a document makes itself from the records of other packages.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, Unpack

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fp8tune.records import Device, Problem
from fp8tune.text import quoted_formula, visible

ATTRIBUTES = {
    "routing": "routing",
    "layout": "input_layout",
    "dtype": "in_dtype",
    "output": "fp8_dtype",
    "scale": "scale_mode",
}
"""What distinguishes problem sizes beside their dimensions, with the field of a problem."""


def value(meaning: str, unit: str = "", source: str | None = None, **options: Any) -> Any:
    """Declare a field by one sentence and its unit. Shares are fractions: 0.01 is 1 %.

    ``source`` is the attribute of a record that holds it, such as ``device.arch``; by default that of the same name.
    """
    return Field(description=meaning, json_schema_extra={"unit": unit}, validation_alias=source, **options)


def _record_value(item: Any) -> Any:
    """Return a field of a record as JSON has it."""
    if isinstance(item, Device):
        return visible(item.name or item.arch)
    if isinstance(item, Problem):
        return {name: getattr(item, field) for name, field in ATTRIBUTES.items()}
    if isinstance(item, Mapping):  # recorded arguments that are no integers are words
        return {name: size if type(size) is int else str(size) for name, size in item.items()}
    return item


Gpu = Annotated[str, BeforeValidator(_record_value)]
"""Name of a device, or its arch if it has no name."""

Size = Annotated[dict[str, int | str], BeforeValidator(_record_value)]
"""Dimensions of a problem."""

Attributes = Annotated[dict[str, str], BeforeValidator(_record_value)]
"""What else distinguishes a problem, by :data:`ATTRIBUTES`."""


class Document(BaseModel):
    """Base of all documents: immutable, and without fields that are not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_by_name=True)

    printed_by: ClassVar[str] = ""
    """Command that prints the document, such as ``show KERNEL``; empty for parts of others."""

    def __init_subclass__(cls, printed_by: str = "", **settings: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**settings)
        cls.printed_by = printed_by

    @classmethod
    def from_records(cls, *records: object, **values: Any) -> Self:
        """Return a document of values and, for other fields, of attributes of the first record that has them."""
        return cls.model_validate({**cls._attributes(records, values), **values})

    @classmethod
    def _attributes(cls, records: Sequence[object], values: Collection[str] = ()) -> dict[str, Any]:
        attributes = {}
        for name, field in cls.model_fields.items():
            if name not in values and field.is_required():
                paths = dict.fromkeys((str(field.validation_alias or name), name))
                items = [item for record in records for path in paths for item in _attribute(record, path)]
                if items:  # else pydantic names the field that is missing
                    attributes[name] = next((item for item in items if item is not None), EMPTY.get(field.annotation))
        return attributes

    @model_validator(mode="before")
    @classmethod
    def _from_record(cls, record: Any) -> dict[str, Any]:
        values = record if isinstance(record, dict) else cls._attributes([record])
        # Names of files and databases may hold control characters or lone surrogates, and JSON has no infinity.
        return {name: _printable(item) for name, item in values.items()}


EMPTY: Mapping[Any, object] = {str: "", dict[str, int | str]: {}, dict[str, str]: {}}
"""Values of fields that are None in all records, by their type; None for others."""


def _attribute(record: object, path: str) -> list[object]:
    """Return the attribute, None if a part of the path is None, or nothing if the record has no such attribute."""
    for name in path.split("."):
        if record is not None and not hasattr(record, name):
            return []
        record = getattr(record, name, None)
    return [record]


def _printable(item: object) -> object:
    if isinstance(item, str):
        return visible(item)
    return None if isinstance(item, float) and not math.isfinite(item) else item


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
    writer.writerows([type(row).model_fields for row in rows[:1]])
    writer.writerows(map(_cell, plain(row).values()) for row in rows)


def _cell(item: object) -> object:
    if isinstance(item, Mapping):
        return " ".join(f"{name}={part}" for name, part in item.items())
    if isinstance(item, bool | list):
        return json.dumps(item)
    return quoted_formula(item) if isinstance(item, str) else item
