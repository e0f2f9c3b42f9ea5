"""Lookups of configs: a user's table over the shipped one, then the key, the nearest key, any shape, the default."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from any_text import any_text
from hypothesis import example, given
from hypothesis import strategies as st

from fp8tune_kernels import catalog, tables
from fp8tune_kernels.identity import code_hash
from fp8tune_kernels.runtime import lookup, user_tables
from fp8tune_kernels.runtime.chain import Step, distance, nearest, taken
from fp8tune_kernels.runtime.user_tables import of_kernel, parsed, user_table
from fp8tune_kernels.spec import DTYPE_FLAG, FLAGS, LAYOUT_FLAG, Span
from fp8tune_kernels.tables import Key, Row, Table, overlay

SPEC = catalog.load("colwise")
DEFAULT = SPEC.default["num_warps"]
ARCH = "interpreter"
"""Of a device that is no GPU; nothing is shipped for it."""


def key(**sizes: int) -> Key:
    return tuple(sorted(sizes.items()))


def row(warps: int, own_key: Key | None, device: str = "", kernel: str = "colwise") -> Row:
    return kernel, device, own_key, (("num_warps", warps),)


def table_of(*rows: Row, nearest: tuple[str, ...] = ()) -> str:
    """Return the text of a user's own table."""
    placed = tuple((*row, 0) for row in rows)
    return f"NEAREST: tuple = {nearest!r}\nORIGINS: tuple = ((),)\nROWS: tuple[object, ...] = {placed!r}\n"


NEAR, OTHER, FAR = (key(M_bucket=16384, K=size, G=64) for size in (5120, 7168, 1024))
ROWS = (row(2, NEAR, "H200"), row(4, NEAR), row(8, None, "H200"), row(16, None), row(32, OTHER))


# Rows of one table


@pytest.mark.parametrize(
    ("rows", "device", "warps", "by_nearest"),
    [
        pytest.param(ROWS, "H200", 2, 2, id="this device, this key"),
        pytest.param(ROWS, "H100", 4, 4, id="this arch, this key"),
        pytest.param(ROWS[1:], "H200", 4, 4, id="the key before the device"),
        pytest.param(ROWS[2:], "H200", 8, 32, id="this device, any shape; another key before any shape"),
        pytest.param(ROWS[2:], "H100", 16, 32, id="this arch, any shape"),
        pytest.param(ROWS[4:], "H100", DEFAULT, 32, id="another shape only"),
        pytest.param((*ROWS[2:], row(64, OTHER, "H200")), "H200", 8, 64, id="as near, of this device"),
        pytest.param((*ROWS[2:], row(64, OTHER, "H200")), "H100", 16, 32, id="as near, of another device"),
        pytest.param((*ROWS[2:], row(64, FAR, "H200")), "H200", 8, 32, id="of this device, but further"),
        pytest.param((), "H100", DEFAULT, DEFAULT, id="no row"),
        pytest.param((row(2, NEAR, kernel="rowwise"),), "", DEFAULT, DEFAULT, id="another kernel"),
    ],
)
def test_the_most_specific_row_wins(rows: tuple[Row, ...], device: str, warps: int, by_nearest: int) -> None:
    """``by_nearest``: where the table names the kernel for the nearest key."""
    for order in (rows, rows[::-1]):
        for names, right in ((("rowwise",), warps), (("colwise",), by_nearest)):
            picked = lookup.pick(SPEC, dict(NEAR), Table(order, names), device)
            assert picked == {**SPEC.default, "num_warps": right}


@pytest.mark.parametrize(
    ("first", "second", "far"),
    [
        pytest.param(key(G=4, K=2048), key(G=8, K=1024), 2.0, id="a doubling and a halving"),
        pytest.param(key(K=5120), key(K=7168), math.log2(1.4) ** 2, id="no power of two"),
        pytest.param(key(G=0), key(G=1), 1.0, id="0 before 1 as 1 before 2"),
        pytest.param(key(G=4, M_bucket=4096), key(G=8, M_bucket=8192), 2.0, id="more groups of as many rows"),
        pytest.param(key(G=2, M_bucket=8192), key(G=4, M_bucket=4096), 6.0, id="fewer rows in more groups"),
        pytest.param(key(K=64), key(N=64), math.inf, id="other names"),
        *[pytest.param(key(K=64, **{flag: 1}), key(K=64, **{flag: 0}), math.inf, id=flag) for flag in sorted(FLAGS)],
    ],
)
def test_distance_is_of_ratios(first: Key, second: Key, far: float) -> None:
    assert {LAYOUT_FLAG, DTYPE_FLAG} == FLAGS
    assert distance(first, first) == 0
    assert distance(first, second) == distance(second, first) == pytest.approx(far)


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        pytest.param([row(4, key(K=2560)), row(4, key(K=10240))], 0, id="as far: the key that sorts first"),
        pytest.param([row(4, key(K=2560)), row(4, key(K=10240), "H200")], 1, id="as far: the device"),
        pytest.param([row(4, key(K=4096)), row(4, key(K=10240), "H200")], 0, id="nearer than the device's"),
        pytest.param([row(4, None), row(4, key(K=1 << 40))], 1, id="however far"),
    ],
)
def test_the_least_far_then_the_device_then_the_order_of_keys(rows: list[Row], place: int) -> None:
    assert nearest(key(K=5120), rows) == nearest(key(K=5120), rows[::-1]) == rows[place]


sizes = st.one_of(st.integers(0, 8), st.integers(0, 2**63 - 1))
keys = st.builds(key, G=sizes, K=sizes, M_bucket=sizes)
some_rows = st.builds(row, st.sampled_from([2, 4, 8]), keys, st.sampled_from(["", "H200"]))


@given(keys, st.lists(some_rows, min_size=1, max_size=8), st.randoms(use_true_random=False))
@example(NEAR, [row(2, key(G=1, K=2**62, M_bucket=1)), row(4, key(G=1, K=2**62 + 1, M_bucket=1))], random.Random(0))
def test_none_is_nearer_whatever_the_order_of_rows(expected: Key, rows: list[Row], generator: random.Random) -> None:
    result = nearest(expected, rows)
    assert nearest(expected, generator.sample(rows, len(rows))) == result
    assert result is not None
    assert result[2] is not None
    assert all(distance(expected, result[2]) <= distance(expected, own) for _, _, own, _ in rows if own is not None)
    for _, _, own, _ in rows:  # also where ratios of large sizes round to 1
        assert own is not None
        assert (own_nearest := nearest(own, rows)) is not None
        assert own_nearest[2] == own


# Rows that do not suit another key


def tile(size: int, *columns: int) -> Row:
    return "rowwise-2d", "", key(K=size), tuple(("BLOCK_SIZE_ITER", count) for count in columns)


@pytest.mark.parametrize(
    ("expected", "rows", "place"),
    [
        pytest.param(14336, [tile(8192, 8192), tile(5120, 1024)], 1, id="the next that suits"),
        pytest.param(14336, [tile(8192, 4096), tile(5120, 1024)], 0, id="it read twice where measured"),
        pytest.param(7168, [tile(8192, 8192), tile(5120, 1024)], 0, id="it reads once here, too"),
        pytest.param(4096, [tile(8192, 4096), tile(1024, 1024)], 0, id="it reads once here, not there"),
        pytest.param(8193, [tile(8192, 8192)], None, id="none suits"),
        pytest.param(8193, [tile(8192)], None, id="an axis left out has the default's value"),
    ],
)
def test_a_row_in_one_piece_is_not_taken_for_a_longer_row(expected: int, rows: list[Row], place: int | None) -> None:
    """Sizes as ``rowwise-2d`` has them: on an H200 the row of 8192 lost 28 % at 14336."""
    result = nearest(key(K=expected), rows, Span("BLOCK_SIZE_ITER", "K"), {"BLOCK_SIZE_ITER": 8192})
    assert result == (None if place is None else rows[place])


@pytest.mark.parametrize(
    ("expected", "warps", "measured", "suits"),
    [
        *((14336, 4, 8192, False), (14336, 8, 8192, True), (8192, 4, 2048, True), (8193, 4, 2048, False)),
        *((14336, 4, 14336, True), (1408, 4, 14336, True)),  # what was measured is the key's own, or longer
        *((14336, 4, None, False), (14336, 8, None, True)),  # the fallback row
    ],
)
def test_no_thread_has_more_of_a_longer_row_in_registers(
    expected: int, warps: int, measured: int | None, suits: bool
) -> None:
    """The gradient of 14,336 columns took 779 us on an H200 with the config of shorter rows."""
    span = Span(None, "N", values_a_thread=64)
    assert span.suits({"num_warps": warps}, {} if measured is None else {"N": measured}, {"N": expected}) == suits


@pytest.mark.parametrize(("columns", "step"), [(8192, Step.FALLBACK), (14336, Step.DEFAULT)])
def test_a_fallback_row_that_does_not_suit_gives_way_to_the_default(columns: int, step: Step) -> None:
    spec = catalog.load("swiglu-gradient")
    fallback: Row = (spec.name, "", None, (("BLOCK_SIZE_M", 16), ("TILE", 2048), ("num_warps", 4), ("num_stages", 3)))
    expected = {"M_bucket": 8192, "N": columns, "G": 8, DTYPE_FLAG: 3}
    assert taken(spec, expected, Table((fallback,)), "")[0] == step


# A user's table over the shipped one


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder."""
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
    lookup.forget()
    yield tmp_path
    lookup.forget()


def looked_up(own_key: Key = NEAR) -> int:
    config = lookup.config_for(SPEC, tuple(dict(own_key)[name] for name in SPEC.key), torch.device("cpu"))
    return config["num_warps"]


def test_a_users_row_comes_before_the_shipped_one_is_read_once_and_nothing_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lookup.running_arch(torch.device("cpu")) == ARCH
    assert looked_up() == DEFAULT
    lookup.forget()
    shipped = ModuleType(f"fp8tune_kernels.tables.{ARCH}")
    shipped.ROWS = ((*row(2, NEAR), 0), (*row(4, OTHER), 0), (*row(16, None), 0))  # type: ignore[attr-defined]
    shipped.NEAREST = ()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, shipped.__name__, shipped)
    (folder / f"{ARCH}.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n" + table_of(row(32, NEAR)))
    assert looked_up() == 32
    (folder / f"{ARCH}.py").write_text("no table")
    assert looked_up(OTHER) == 4  # which the user's table has not
    assert looked_up(key(G=1, K=1, M_bucket=1)) == 16
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("device", "rows", "left"),
    [
        ("", [row(2, NEAR), row(4, NEAR, "H200"), row(8, OTHER)], [2]),
        ("H200", [row(2, NEAR), row(4, NEAR, "H200"), row(8, NEAR, "H100")], [0, 2]),
    ],
)
def test_a_row_hides_the_shipped_ones_of_its_key_on_its_device(device: str, rows: list[Row], left: list[int]) -> None:
    own = row(64, NEAR, device)
    assert overlay(Table((own,)), Table(tuple(rows))).rows == (own, *[rows[place] for place in left])


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (Table(), ("colwise",)),
        (Table((row(2, NEAR),)), ("colwise",)),  # it says nothing of any other shape
        (Table((row(2, None),)), ()),
        (Table((row(2, None),), ("colwise",)), ("colwise",)),
        (Table((row(2, None, kernel="rowwise"),), ("rowwise",)), ("colwise", "rowwise")),
    ],
)
def test_the_rule_is_that_of_the_table_with_the_row_for_any_other_shape(own: Table, names: tuple[str, ...]) -> None:
    assert overlay(own, Table((row(4, None),), ("colwise",))).nearest == names


@pytest.mark.parametrize(
    ("version", "warps"),
    [
        ("", 2),
        ("3.6.0", 2),
        ("3.8.1", 2),
        ("3.9.0", 4),
        ("3.9.0+git0a1b2c3", 4),
        ("3.10.0", 8),
        ("3.11.0", 8),
        ("4.0", 8),
    ],
)
def test_shipped_rows_are_those_of_the_newest_triton_that_is_not_newer_than_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, warps: int
) -> None:
    for name, rows in {
        "sm_0": (row(2, NEAR), row(16, OTHER)),
        "sm_0_triton_3_9": (row(4, NEAR),),
        "sm_0_triton_3_10": (row(8, NEAR),),
    }.items():
        (tmp_path / f"{name}.py").write_text(table_of(*rows))
        monkeypatch.delitem(sys.modules, f"{tables.__name__}.{name}", raising=False)
    monkeypatch.setattr(tables, "__path__", [str(tmp_path)])
    monkeypatch.setattr(tables, "_installed", lambda: version)
    lookup.forget()
    for exported in (tables.table("sm_0", version), tables.table("sm_0")):
        assert [taken(SPEC, dict(key or ()), exported, "")[1] for key in (NEAR, OTHER)] == [
            row(warps, NEAR),
            row(16, OTHER),
        ]
    lookup.forget()


def test_the_installed_triton_is_known_without_its_package_or_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables._installed() == triton.__version__
    monkeypatch.delitem(sys.modules, "triton")
    assert tables._installed() == metadata.version("triton")
    monkeypatch.setattr(metadata, "version", lambda name: metadata.distribution(f"no-{name}").version)
    assert tables._installed() == ""
    assert "triton" not in sys.modules


def test_rows_of_another_version_of_a_kernel_are_left_out_and_named() -> None:
    old: Row = ("colwise", "", NEAR, (("num_wraps", 2),))
    older = row(2, key(K=5120))
    with pytest.warns(UserWarning, match="2 rows of colwise"):
        table = of_kernel(SPEC, Table((old, older, row(4, NEAR), row(8, NEAR, kernel="rowwise"))))
    assert table.rows == (row(4, NEAR),)


def test_rows_of_other_code_are_left_out_and_named() -> None:
    for code, count in ((code_hash("fp8tune_kernels.quantize.colwise:SPEC"), 1), ("0" * 16, 0)):
        own = Table((row(4, NEAR),), codes=(code,))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(of_kernel(SPEC, own).rows) == count
        assert [str(item.message).count("are of other code of the kernel") for item in caught] == [1] * (1 - count)


def test_without_a_table_or_a_folder_there_are_no_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_table(ARCH) == user_table("../x") == Table()
    for arch in ("sm_998", ARCH, "../x", "a.b", ""):
        assert lookup.table(arch) == Table()
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


def test_a_table_that_cannot_be_read_is_said_and_a_broken_one_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"{ARCH}.py").mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert user_table(ARCH) == Table()
    lookup.forget()
    (folder / f"{ARCH}.py").rmdir()
    (folder / f"{ARCH}.py").write_text("ROWS: tuple = ((1, 2),)\n")
    with pytest.raises(ValueError, match="is no table") as raised:
        looked_up()
    assert str(folder) in str(raised.value)
    module = ModuleType("fp8tune_kernels.tables.sm_997")  # it has no ROWS
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(AttributeError):
        lookup.table("sm_997")


HEAD = "NEAREST: tuple = ()\nORIGINS: tuple = ((),)\n"
GOOD = ("colwise", "", (("K", 1),), (("num_warps", 2),), 0)


@given(st.sampled_from(range(5)), st.sampled_from([1, "x", None, (1,), (("K", 1.5),), -1, True, (("K", True),)]))
def test_a_row_with_another_part_is_none(place: int, part: object) -> None:
    changed = (*GOOD[:place], part, *GOOD[place + 1 :])
    assert len(parsed(f"{HEAD}ROWS: tuple = ({GOOD!r},)").rows) == 1
    if changed == GOOD or (place < 2 and isinstance(part, str)) or (place == 2 and part is None):
        return
    with pytest.raises(ValueError, match="is no row"):
        parsed(f"{HEAD}ROWS: tuple = ({changed!r},)")


@given(
    st.one_of(
        *(any_text(), any_text().map((HEAD + "ROWS: tuple = ({!r},)").format)),
        st.sampled_from([HEAD + "ROWS: tuple = " + "(" * 5000, HEAD + "ROWS: tuple = (open('ran', 'w'),)"]),
    )
)
def test_any_text_is_a_table_or_one_error(text: str) -> None:
    try:
        assert parsed(text).rows == ()
    except ValueError as error:
        assert "\n" not in str(error)
