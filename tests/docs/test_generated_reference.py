"""The reference pages name everything that the code has, and refuse what has no text."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import typer
from places import ROOT
from sqlalchemy import MetaData, Table

from benchmarks import diagrams
from fp8tune import cli
from fp8tune.api import frames as columns
from fp8tune.errors import EXIT_CODES
from fp8tune.options import Option
from fp8tune.render import contracts
from fp8tune.render.documents import DOCUMENTS
from fp8tune.render.fields import Document, Field, Fields, faults, field
from fp8tune.store.schema import METADATA
from fp8tune_kernels.spec import KernelSpec

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import fp8tune_reference
from fp8tune_reference import commands, database, frames, json, spec, words
from fp8tune_reference.markdown import UndocumentedError, marked, prose, table

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
        for one in command.params:
            for option in one.opts if one.param_type_name == "option" and not one.hidden else ():
                assert re.search(rf"^\| `(-\w, )?{option}\b", sections[name], re.MULTILINE), (name, option)
        for example in command.examples:
            assert example.command in sections[name]


def paths(fields: Fields, path: str = "") -> Iterator[str]:
    for one in fields:
        yield path + one.name
        yield from paths(
            one.of, f"{path}{one.name}{'[]' if one.type.startswith('list') else '.*' if one.keyed else ''}."
        )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_json_field_is_a_row(name: str) -> None:
    text = json.section(DOCUMENTS[name])
    assert re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) == list(paths(DOCUMENTS[name].fields))
    assert json.part().count(text) >= 1


def test_whatever_makes_a_printed_object_is_declared() -> None:
    made = {
        name
        for name, one in inspect.getmembers(contracts, inspect.isfunction)
        if one.__module__ == contracts.__name__ and "Object" in one.__annotations__["return"] and name[0] != "_"
    }
    assert made <= DOCUMENTS.keys()


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({"path": "a", "added": 1, "already_there": 2}, []),
        ({"path": "a", "added": 1, "already_there": 2, "planted": 3}, ["planted is not declared"]),
        ({"path": "a", "added": 1}, ["already_there is missing"]),
        ({"path": "a", "added": None, "already_there": 2}, ["added is null"]),
        ({"path": "a", "added": "1", "already_there": 2}, ["added is '1', not integer"]),
    ],
)
def test_an_object_that_is_not_as_declared_is_told_apart(found: dict[str, object], wrong: list[str]) -> None:
    assert list(faults(DOCUMENTS["imported"].fields, found)) == wrong


def test_every_table_and_column_is_a_row(parts: dict[str, str]) -> None:
    for one in METADATA.tables.values():
        section = parts["database"].partition(f"## `{one.name}`\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == [column.name for column in one.columns]


def test_every_spec_field_word_and_exit_code_is_there(parts: dict[str, str]) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", parts["spec"], re.MULTILINE)
    assert {one.name for one in dataclasses.fields(KernelSpec)} <= {*rows}
    for kind in words.WORDS.values():
        assert all(f"| `{word}` |" in parts["words"] for word in kind)
    assert re.findall(r"^\| `(\d+)` \|", parts["exit-codes"], re.MULTILINE) == [str(code) for code in EXIT_CODES]


def test_every_column_of_the_data_frames_is_a_row(parts: dict[str, str]) -> None:
    tables = [value for name, value in vars(columns).items() if name.isupper() and isinstance(value, tuple)]
    assert len(tables) == len(frames.METHODS)
    for one in itertools.chain(*tables):
        assert f"| `{one.name}` | `{one.dtype}` |" in parts["frames"]


def test_pages_end_up_as_tables_of_one_width(parts: dict[str, str]) -> None:
    for text in parts.values():
        for rows in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows.splitlines()}) == 1


class Nameless(enum.StrEnum):
    KNOWN = "known"
    """A word with a text."""
    PLANTED = "planted"


@dataclasses.dataclass(frozen=True)
class Planted:
    """A record with a field that nothing says."""

    planted: int = 0


def planted_command(quiet: Annotated[bool, Option("--quiet", "")] = False) -> None:
    """Do nothing."""


def planted_document(one: Field) -> dict[str, Document]:
    return {"planted": Document("show", "An object.", (one,))}


@pytest.mark.parametrize(
    ("generate", "named"),
    [
        (lambda: json.part(planted_document(field("planted", "text", ""))), "JSON field planted"),
        (
            lambda: json.part(
                planted_document(field("rows", "list of objects", "x", of=(Field("planted", "text", ""),)))
            ),
            r"JSON field rows\[\].planted",
        ),
        (lambda: commands.section(planted_command), "--quiet of planted-command"),
        (lambda: words.of(Nameless), "Nameless.PLANTED"),
        (lambda: spec.section(Planted), "Planted.planted"),
        (lambda: database.table_section(Table("planted", MetaData())), "table planted"),
        (lambda: frames.section("x()", [columns.Column("planted", "Int64", "", str)], "x"), "column planted of"),
    ],
)
def test_what_is_planted_without_a_text_is_refused(generate: Any, named: str) -> None:
    with pytest.raises(UndocumentedError, match=named):
        generate()


def test_docstrings_become_markdown() -> None:
    assert prose("A ``b``\n of :class:`fp8tune.records.Device`, :attr:`~x.y`.") == "A `b` of `records.Device`, `x.y`."
    assert prose("``<a>`` or <NA>") == "`<a>` or &lt;NA>"
    assert marked("with --quick, not `--db`") == "with `--quick`, not `--db`"
    assert table(["a"], [["`b|c`"]]) == "| a |\n| --- |\n| `b\\|c` |"


def test_the_pictures_are_those_that_are_drawn() -> None:
    assert [path.name for path, text in diagrams.files().items() if path.read_text(encoding="utf-8") != text] == []
