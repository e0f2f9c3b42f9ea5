"""The reference pages name everything that the code has, and refuse what has no text."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator

import pytest
import typer
from places import ROOT
from sqlalchemy import MetaData, Table

from benchmarks import diagrams
from fp8tune import cli
from fp8tune.api import frames as columns
from fp8tune.errors import EXIT_CODES
from fp8tune.render.documents import DOCUMENTS
from fp8tune.render.fields import Document, Fields, field
from fp8tune.store.schema import METADATA
from fp8tune_kernels.spec import KernelSpec

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import fp8tune_reference
from fp8tune_reference import database, frames, json, words
from fp8tune_reference.markdown import UndocumentedError

PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def parts() -> dict[str, str]:
    return {name: part() for name, part in fp8tune_reference.PARTS.items()}


def test_every_part_stands_in_a_page_and_every_mark_names_a_part() -> None:
    marks = [name for page in PAGES for name in fp8tune_reference.MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(marks) == sorted(fp8tune_reference.PARTS)


def test_every_command_has_a_section_with_every_option(parts: dict[str, str]) -> None:
    program = typer.main.get_command(cli.app)
    sections = dict(
        re.findall(r"^### `fp8tune ([\w-]+)`\n(.*?)(?=^##|\Z)", parts["commands"], re.MULTILINE | re.DOTALL)
    )
    assert list(sections) == list(program.commands)  # type: ignore[attr-defined]
    for name, command in program.commands.items():  # type: ignore[attr-defined]
        assert f"| `fp8tune {name}` |" in parts["command-list"]
        for item in command.params:
            for option in item.opts if item.param_type_name == "option" and not item.hidden else ():
                assert re.search(rf"^\| `(-\w, )?{option}\b", sections[name], re.MULTILINE), (name, option)
        for example in command.examples:
            assert example.command in sections[name]


def paths(fields: Fields, path: str = "") -> Iterator[str]:
    for item in fields:
        yield path + item.name
        yield from paths(
            item.of, f"{path}{item.name}{'[]' if item.type.startswith('list') else '.*' if item.keyed else ''}."
        )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_json_field_is_a_row(name: str) -> None:
    text = json.section(DOCUMENTS[name])
    assert re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) == list(paths(DOCUMENTS[name].fields))
    assert json.part().count(text) >= 1


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
    tables = [value for name, value in vars(columns).items() if name.isupper() and isinstance(value, tuple)]
    assert len(tables) == len(frames.METHODS)
    for item in itertools.chain(*tables):
        assert f"| `{item.name}` | `{item.dtype}` |" in parts["frames"]


def test_a_field_without_a_text_is_refused() -> None:
    with pytest.raises(UndocumentedError, match="JSON field planted"):
        json.part({"planted": Document("show", "An object.", (field("planted", "text", ""),))})
    with pytest.raises(UndocumentedError, match="table planted"):
        database.table_section(Table("planted", MetaData()))


def test_the_pictures_are_those_that_are_drawn() -> None:
    assert [path.name for path, text in diagrams.files().items() if path.read_text(encoding="utf-8") != text] == []
