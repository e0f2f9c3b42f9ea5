"""Generated parts of the reference pages: `python -m benchmarks.reference PART` prints one of them as Markdown.

`python -m benchmarks.printed` writes them into docs/reference, and its `--check` compares. The JSON schema is a file:

    python -m benchmarks.reference schema > docs/reference/json-schema.json
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from pydantic.json_schema import JsonSchemaMode, models_json_schema

import fp8tune.api
import fp8tune.output
from benchmarks.tables import table
from fp8tune.api import frames
from fp8tune.cli.program import command_line
from fp8tune.errors import EXIT_CODES
from fp8tune.output.documents import Document
from fp8tune.store.schema import METADATA
from fp8tune_kernels import spec


def bullets(rows: Sequence[tuple[str, str]]) -> str:
    """Return a list of names and descriptions. Raises ValueError for a name without a description."""
    if silent := [name for name, text in rows if not text.strip()]:
        raise ValueError(f"{silent[0]} has no description: write its docstring")
    return "\n".join(f"- {name}: {text}" for name, text in rows)


def clause(text: str) -> str:
    """Return a description up to its first full stop or semicolon."""
    return re.split(r"[.;] |[.:]$", text)[0]


def prose(text: str) -> str:
    """Return a docstring as one line of Markdown: roles and double backquotes become code."""
    plain = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1].rpartition('.')[2]}`", text)
    joined = " ".join(re.sub(r"``(.+?)``", r"`\1`", plain).split())
    return re.sub(r"(`[^`]*`)|<", lambda part: part[1] or "&lt;", joined)


def summary(subject: object) -> str:
    """Return the first paragraph of a docstring."""
    return prose((inspect.getdoc(subject) or "").partition("\n\n")[0])


# Commands


def helps() -> Iterator[tuple[str, str]]:
    """Yield each command with its help text, as a terminal of 80 columns shows it."""
    program = command_line()
    root = program.make_context("fp8tune", ["db"], resilient_parsing=True)
    contexts = [type(root)(program.commands[name], info_name=name, parent=root) for name in program.list_commands(root)]
    with mock.patch.dict(os.environ, COLUMNS="80"):
        for context in contexts:
            yield context.command_path, context.command.get_help(context)
            for name, child in getattr(context.command, "commands", {}).items():
                below = type(root)(child, info_name=name, parent=context)
                yield below.command_path, child.get_help(below)


def commands() -> str:
    """Return a section for each command, and the exit codes."""
    parts = []
    for path, text in helps():
        lines = [line for line in text.strip().splitlines() if line.strip() and "Show this message" not in line]
        parts.append(f"## {path}\n\n```text\n" + "\n".join(lines) + "\n```")
    codes = [(str(code), prose(text)) for code, text in EXIT_CODES.items()]
    return "\n\n".join([*parts, "## Exit codes", table(["code", "meaning"], codes)])


# Python API


def signature(function: Callable[..., Any]) -> str:
    """Return a call with its parameters and defaults, without types."""
    parameters = inspect.signature(function).parameters.values()
    bare = [item.replace(annotation=inspect.Parameter.empty) for item in parameters if item.name != "self"]
    return f"{function.__name__}{inspect.Signature(bare)}"


def members(owner: type[Any]) -> list[tuple[str, str]]:
    """List the public methods, properties and fields of a class with what they hold."""
    rows = [
        (f"`{signature(value) if inspect.isfunction(value) else name}`", summary(value))
        for name, value in vars(owner).items()
        if not name.startswith("_") and isinstance(value, Callable | property) and name != "reading"  # type: ignore[arg-type]
    ]
    known = {row[0] for row in rows}
    return [(f"`{name}`", text) for name, text in attributes(owner).items() if f"`{name}`" not in known] + rows


def attributes(owner: object) -> Mapping[str, str]:
    """Return the strings below the assignments in a class, by name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body  # type: ignore[arg-type]
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        ast.unparse(field.target): prose(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def api() -> str:
    """Return a section for each function, then its results."""
    parts, results = [], []
    for name in ("open", "sweep", "recheck", "compare", "lookup", "export", "pin", "pin_report", "unpin"):
        function = getattr(fp8tune.api, name)
        arguments = re.findall(r"^ {4}(\w+): (.+?)(?=\n {4}\w+:|\n\n|\Z)", _section(function, "Args"), re.M | re.S)
        rows = [(f"`{argument}`", prose(text)) for argument, text in arguments]
        parts += [f"## fp8tune.{name}", f"```text\n{_wrapped(signature(function))}\n```", summary(function)]
        parts += [bullets(rows)] if rows else []
    owners = ("SweepResult", "Recheck", "Comparison", "Lookup", "Export")
    for owner in (getattr(fp8tune.api, name) for name in owners):
        results += [f"## {owner.__name__}", summary(owner), bullets(members(owner))]
    columns = [
        (f"`Results.{name}()`", ", ".join(f"`{frames.RENAMED.get(field, field)}`" for field in model.model_fields))
        for name, model in frames.TABLES.items()
    ]
    return "\n\n".join([*parts, *results, "## Columns", bullets(columns)])


def _section(subject: object, heading: str) -> str:
    return (inspect.getdoc(subject) or "").partition(f"\n{heading}:\n")[2].partition("\nRaises:")[0]


def _wrapped(call: str) -> str:
    return textwrap.fill(call, 88, subsequent_indent="    ", break_long_words=False)


# JSON


def documents() -> list[type[Document]]:
    """Return all documents that commands print, and their parts, in the order of modules and definitions."""
    for module in pkgutil.iter_modules(fp8tune.output.__path__):
        importlib.import_module(f"fp8tune.output.{module.name}")
    models = [model for model in _leaves(Document) if model.__module__.startswith("fp8tune.output.")]
    return sorted(models, key=lambda model: model.__module__)  # whatever was imported first


def _leaves(model: type[Document]) -> Iterator[type[Document]]:
    for child in model.__subclasses__():
        if not child.__subclasses__():
            yield child
        yield from _leaves(child)


def json_documents() -> str:
    """Return the documents with their fields, then their parts."""
    rows = [
        (
            f"`fp8tune {model.printed_by}`" if model.printed_by else model.__name__,
            ", ".join(map(_field, model.model_fields.items())),
        )
        for model in sorted(documents(), key=lambda model: not model.printed_by)
    ]
    return bullets(rows)


def _field(item: tuple[str, Any]) -> str:
    name, field = item
    text = re.sub(r"(\w+\.)+", "", inspect.formatannotation(field.annotation))
    names = {model.__name__ for model in documents()}
    part = next((word for word in re.findall(r"\w+", text) if word in names), "")
    return f"`{name}`" + (f" ({part})" if part else "")


def schema() -> str:
    """Return the JSON schema of all documents."""
    models: list[tuple[type[Document], JsonSchemaMode]] = [
        (model, "serialization") for model in documents() if model.printed_by
    ]
    _, definitions = models_json_schema(models, title="Documents that fp8tune prints")
    return json.dumps(definitions, indent=1)


# Database and specification


def database() -> str:
    """Return all tables and what they hold."""
    return bullets([(f"`{item.name}`", clause(prose(item.info["about"]))) for item in METADATA.tables.values()])


def specification() -> str:
    """Return the fields of a kernel specification."""
    texts = attributes(spec.KernelSpec)
    return bullets(
        [
            (f"`{field.name}`{' (required)' if _is_required(field) else ''}", clause(texts.get(field.name, "")))
            for field in dataclasses.fields(spec.KernelSpec)
        ]
    )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


PARTS: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "api": api,
    "json": json_documents,
    "schema": schema,
    "database": database,
    "spec": specification,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=[*PARTS])
    print(PARTS[parser.parse_args(arguments).part]())


if __name__ == "__main__":
    main()
