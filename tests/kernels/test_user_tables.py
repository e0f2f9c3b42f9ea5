"""A user's own tables: read before the shipped ones, as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_tables import table_of

from fp8tune_kernels import catalog
from fp8tune_kernels.runtime import lookup, user_tables
from fp8tune_kernels.runtime.user_tables import of_kernel, overlay, parsed, user_table
from fp8tune_kernels.tables import Key, Row, Table

SPEC = catalog.load("colwise")
NEAR: Key = (("G", 64), ("K", 5120), ("M_bucket", 16384))
OTHER: Key = (("G", 64), ("K", 7168), ("M_bucket", 16384))
ARCH = "interpreter"
"""Of a device that is no GPU; nothing is shipped for it."""


HEAD = "NEAREST: tuple = ()\nORIGINS: tuple = ((),)\n"


def row(warps: int, key: Key | None = NEAR, device: str = "", kernel: str = "colwise") -> Row:
    return kernel, device, key, (("num_warps", warps),)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder."""
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
    lookup.forget()
    yield tmp_path
    lookup.forget()


def looked_up(key: Key = NEAR) -> int:
    values = dict(key)
    found = lookup.config_for(SPEC, tuple(values[name] for name in SPEC.key), torch.device("cpu"))
    return found["num_warps"]


def test_a_users_row_comes_before_the_shipped_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = ModuleType(f"fp8tune_kernels.tables.{ARCH}")
    shipped.ROWS = ((*row(2), 0), (*row(4, OTHER), 0), (*row(16, None), 0))  # type: ignore[attr-defined]
    shipped.NEAREST = ()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, shipped.__name__, shipped)
    (folder / f"{ARCH}.py").write_text(table_of(row(32)))
    assert looked_up() == 32
    assert looked_up(OTHER) == 4  # which the user's table has not
    assert looked_up((("G", 1), ("K", 1), ("M_bucket", 1))) == 16


def test_a_table_is_read_once(folder: Path) -> None:
    (folder / f"{ARCH}.py").write_text(table_of(row(32), row(4, OTHER)))
    assert looked_up() == 32
    (folder / f"{ARCH}.py").write_text("no table")
    assert looked_up(OTHER) == 4


def test_nothing_in_a_users_table_runs(folder: Path) -> None:
    text = f"open({str(folder / 'ran')!r}, 'w')\n" + table_of(row(32))
    (folder / f"{ARCH}.py").write_text(text)
    assert looked_up() == 32
    assert not (folder / "ran").exists()
    with pytest.raises(ValueError, match="is not what fp8tune export writes"):
        parsed(HEAD + "ROWS: tuple = (open('ran', 'w'),)")


@pytest.mark.parametrize(
    ("device", "rows", "left"),
    [
        ("", [row(2), row(4, device="H200"), row(8, OTHER)], [row(8, OTHER)]),
        ("H200", [row(2), row(4, device="H200"), row(8, device="H100")], [row(2), row(8, device="H100")]),
    ],
)
def test_a_row_hides_the_shipped_ones_of_its_key_on_its_device(device: str, rows: list[Row], left: list[Row]) -> None:
    own = row(64, device=device)
    assert overlay(Table((own,)), Table(tuple(rows))).rows == (own, *left)


@pytest.mark.parametrize(
    ("own", "nearest"),
    [
        (Table(), ("colwise",)),
        (Table((row(2),)), ("colwise",)),  # it says nothing of any other shape
        (Table((row(2, None),)), ()),
        (Table((row(2, None),), ("colwise",)), ("colwise",)),
        (Table((row(2, None, kernel="rowwise"),), ("rowwise",)), ("colwise", "rowwise")),
    ],
)
def test_the_rule_is_that_of_the_table_with_the_row_for_any_other_shape(own: Table, nearest: tuple[str, ...]) -> None:
    assert overlay(own, Table((row(4, None),), ("colwise",))).nearest == nearest


def test_rows_of_another_version_of_a_kernel_are_left_out_and_named() -> None:
    old: Row = ("colwise", "", NEAR, (("num_wraps", 2),))
    older: Row = ("colwise", "", (("K", 5120),), (("num_warps", 2),))
    with pytest.warns(UserWarning, match="2 rows of colwise"):
        assert of_kernel(SPEC, Table((old, older, row(4), row(8, kernel="rowwise")))).rows == (row(4),)


def test_without_a_table_or_a_folder_there_are_no_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_table(ARCH) == user_table("../x") == Table()
    monkeypatch.setenv("FP8TUNE_TABLES", "")
    assert user_tables.folder() is None
    assert user_table("sm_98") == Table()
    monkeypatch.setenv("FP8TUNE_TABLES", str(folder / "a file" / "below"))
    (folder / "a file").write_text("")
    assert user_table("sm_97") == Table()


@pytest.mark.parametrize(
    ("data", "below"),
    [("/data", "/data/fp8tune/tables"), ("", "/home/me/.local/share/fp8tune/tables"), ("x", "/home/me")],
)
def test_the_folder_is_the_users_data_folder(data: str, below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8TUNE_TABLES")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_DATA_HOME", data)
    assert str(user_tables.folder()).startswith(below)


def test_a_folder_that_cannot_be_read_is_said_once_and_the_shipped_table_stands(folder: Path) -> None:
    (folder / f"{ARCH}.py").mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert user_table(ARCH) == Table()


def test_a_broken_table_is_no_missing_table(folder: Path) -> None:
    (folder / f"{ARCH}.py").write_text("ROWS: tuple = ((1, 2),)\n")
    with pytest.raises(ValueError, match="is no table") as raised:
        looked_up()
    assert str(folder) in str(raised.value)


@given(
    st.one_of(
        st.text(), st.text().map((HEAD + "ROWS: tuple = ({!r},)").format), st.just(HEAD + "ROWS: tuple = " + "(" * 5000)
    )
)
def test_any_text_is_a_table_or_one_error(text: str) -> None:
    try:
        assert parsed(text).rows == ()
    except ValueError as error:
        assert "\n" not in str(error)
