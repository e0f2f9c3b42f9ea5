"""The reference pages name everything that the code has, and refuse what has no text."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from places import ROOT

from benchmarks import reference
from fp8tune.cli.program import command_line
from fp8tune.errors import EXIT_CODES
from fp8tune.output.documents import Document
from fp8tune.store.schema import METADATA
from fp8tune_kernels.spec import KernelSpec


def test_every_command_and_exit_code_has_its_place() -> None:
    text = reference.commands()
    sections = dict(re.findall(r"^## fp8tune ([\w -]+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    for name, command in command_line().commands.items():
        for item in command.params:
            for option in item.opts if item.param_type_name == "option" and not item.hidden else ():
                assert option in sections[name], (name, option)
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(code) for code in EXIT_CODES]


def test_every_table_field_and_document_is_listed() -> None:
    assert re.findall(r"^- `(\w+)`", reference.database(), re.MULTILINE) == [*METADATA.tables]
    fields = [field.name for field in dataclasses.fields(KernelSpec)]
    assert re.findall(r"^- `(\w+)`", reference.specification(), re.MULTILINE) == fields
    assert all(f"`fp8tune {model.printed_by}`" in reference.json_documents() for model in printed())


def printed() -> list[type[Document]]:
    return [model for model in reference.documents() if model.printed_by]


def test_the_schema_is_that_of_the_code() -> None:
    """Print it again with python -m benchmarks.reference schema > docs/reference/json-schema.json."""
    committed = (ROOT / "docs" / "reference" / "json-schema.json").read_text(encoding="utf-8")
    assert json.loads(committed) == json.loads(reference.schema())


def test_a_name_without_a_description_is_refused() -> None:
    with pytest.raises(ValueError, match="`planted` has no description"):
        reference.bullets([("`planted`", " ")])
