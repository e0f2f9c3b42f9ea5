"""Reference page and schema of all JSON, written by ``python -m fp8tune.output.reference`` from a checkout."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic.json_schema import JsonSchemaMode, models_json_schema

import fp8tune.output
from fp8tune.output.documents import Document

PAGE, SCHEMA = Path("docs/reference/json.md"), Path("docs/reference/json-schema.json")

_INTRODUCTION = """\
# JSON

<!-- Written by python -m fp8tune.output.reference: do not edit. -->

Every command that prints a table takes `--format json`. `sweep`, `worker` and `db import` print one document a line,
as the work goes on. The others print one document at the end.

- A field is always there. It is `null` only where its type says so.
- Shares are fractions: 0.01 is 1 %. Speedups are ratios: 1.31 is 1.31x.
- Fields stay within a major version. New ones may come.
- [json-schema.json](json-schema.json) has the same as a JSON schema.
"""


def documents() -> list[type[Document]]:
    """Return all documents that commands print, and their parts, in the order of modules and definitions."""
    for module in pkgutil.iter_modules(fp8tune.output.__path__):
        importlib.import_module(f"fp8tune.output.{module.name}")
    models = [model for model in _subclasses(Document) if model.__module__.startswith("fp8tune.output.")]
    return sorted(models, key=lambda model: model.__module__)  # whatever was imported first


def _subclasses(model: type[Document]) -> Iterator[type[Document]]:
    for child in model.__subclasses__():
        if not child.__subclasses__():
            yield child
        yield from _subclasses(child)


def page() -> str:
    """Return the reference page as Markdown."""
    return "\n".join([_INTRODUCTION, *map(_section, documents())])


def _section(model: type[Document]) -> str:
    printed = f"`fp8tune {model.printed_by}`: " if model.printed_by else ""
    lines = [f"## {model.__name__}", "", f"{printed}{inspect.getdoc(model)}", ""]
    lines += ["| field | type | unit | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = re.sub(r"(\w+\.)+", "", inspect.formatannotation(field.annotation)).replace("|", "or")
        unit = field.json_schema_extra["unit"] if isinstance(field.json_schema_extra, dict) else ""
        lines.append(f"| `{name}` | {kind.replace('NoneType', 'None')} | {unit or '-'} | {field.description} |")
    return "\n".join([*lines, ""])


def schema() -> str:
    """Return the JSON schema of all documents."""
    models: list[tuple[type[Document], JsonSchemaMode]] = [
        (model, "serialization") for model in documents() if model.printed_by
    ]
    _, definitions = models_json_schema(models, title="Documents that fp8tune prints")
    return json.dumps(definitions, indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
