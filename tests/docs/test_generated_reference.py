"""The reference pages name everything that the code has, and refuse what has no text."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest
from places import ROOT
from sqlalchemy import MetaData, Table

from fp8tune.api import frames as columns
from fp8tune.cli.program import command_line
from fp8tune.errors import EXIT_CODES
from fp8tune.store.schema import METADATA
from fp8tune_kernels.spec import KernelSpec

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import fp8tune_reference
from fp8tune_reference import database, words
from fp8tune_reference.markdown import UndocumentedError

PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def parts() -> dict[str, str]:
    return {name: part() for name, part in fp8tune_reference.PARTS.items()}


def test_every_part_stands_in_a_page_and_every_mark_names_a_part() -> None:
    marks = [name for page in PAGES for name in fp8tune_reference.MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(marks) == sorted(fp8tune_reference.PARTS)


def test_every_command_has_a_section_with_its_help(parts: dict[str, str]) -> None:
    sections = dict(
        re.findall(r"^## `fp8tune ([\w -]+)`\n(.*?)(?=^##|\Z)", parts["commands"], re.MULTILINE | re.DOTALL)
    )
    for name, command in command_line().commands.items():
        assert f"| `fp8tune {name}` |" in parts["command-list"]
        for item in command.params:
            for option in item.opts if item.param_type_name == "option" and not item.hidden else ():
                assert option in sections[name], (name, option)


def test_every_table_and_column_is_a_row(parts: dict[str, str]) -> None:
    for item in METADATA.tables.values():
        section = parts["database"].partition(f"## `{item.name}`\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == [column.name for column in item.columns]


def test_every_spec_field_word_and_exit_code_is_there(parts: dict[str, str]) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", parts["spec"], re.MULTILINE)
    assert {item.name for item in dataclasses.fields(KernelSpec)} <= {*rows}
    for kind in words.WORDS.values():
        assert all(f"| `{word}` |" in parts["words"] for word in kind)
    assert re.findall(r"^\| `(\d+)` \|", parts["exit-codes"], re.MULTILINE) == [str(code) for code in EXIT_CODES]


def test_every_column_of_the_data_frames_is_a_row(parts: dict[str, str]) -> None:
    for method, model in columns.TABLES.items():
        section = parts["frames"].partition(f"Results.{method}()")[2].partition("\n### ")[0]
        names = [columns.RENAMED.get(name, name) for name in model.model_fields]
        assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == names


def test_a_table_without_a_text_is_refused() -> None:
    with pytest.raises(UndocumentedError, match="table planted"):
        database.table_section(Table("planted", MetaData()))
