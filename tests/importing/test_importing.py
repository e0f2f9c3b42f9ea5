from __future__ import annotations

import csv
from pathlib import Path

import pytest
from any_text import any_text
from database_rows import import_file
from hypothesis import given
from hypothesis import strategies as st
from places import PUBLISHED

from fp8tune.errors import DatabaseError, Fp8tuneError, UsageError
from fp8tune.importing import published
from fp8tune.importing.files import ImportReport, load
from fp8tune.importing.published import COLUMNS
from fp8tune.records import Kind, NamedInts, Problem
from fp8tune.store.results import Store

GOOD = {
    "source": "pytorch/ao#4069",
    "device": "AMD Instinct MI300X",
    "arch": "gfx942",
    "kernel": "colwise",
    "shape": "M=16640 K=5120 G=64",
    "config": "BLOCK_SIZE=32 BLOCK_SIZE_ITER=128 num_warps=4",
    "us": "492",
    "note": "tuned",
}


@pytest.fixture
def store(tmp_path):
    with Store.open(str(tmp_path / "results.db"), create=True) as opened:
        yield opened


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_published_file_is_imported_once(store):
    lines = len(list(csv.DictReader(PUBLISHED.open())))
    assert import_file(store, PUBLISHED) == ImportReport(lines, 0)
    assert import_file(store, PUBLISHED) == ImportReport(0, lines)
    rows = list(store.rows())
    assert len(rows) == lines
    assert {row.kind for row in rows} == {Kind.PUBLISHED}
    assert all(row.source and row.version is None and row.outcome.time_us for row in rows)


def test_a_published_row_says_what_its_source_says(tmp_path):
    (row,) = published.read(write(tmp_path / "x.csv", GOOD))
    assert row.problem == Problem(
        "colwise",
        NamedInts(M=16640, K=5120, G=64),
        routing="unstated",
        fp8_dtype="float8_e4m3fnuz",
        scale_mode="unstated",
    )
    assert row.config == NamedInts(BLOCK_SIZE=32, BLOCK_SIZE_ITER=128, num_warps=4)
    assert (row.device.arch, row.device.name, row.source) == ("gfx942", "AMD Instinct MI300X", "pytorch/ao#4069")


def test_the_transposed_view_is_another_problem(store):
    import_file(store, PUBLISHED)
    layouts = {(item.problem.shape["G"], item.problem.input_layout) for item in store.studies(kernel="rowwise")}
    assert layouts == {(groups, layout) for groups in (1, 16, 64) for layout in ("contiguous", "transposed")}


def test_rows_alike_in_all_but_note_or_time_are_two(tmp_path, store):
    path = write(tmp_path / "x.csv", GOOD, GOOD | {"note": "again"}, GOOD | {"us": "493"}, GOOD)
    assert import_file(store, path) == ImportReport(3, 1)


def test_a_row_without_a_config_names_none(tmp_path):
    (row,) = published.read(write(tmp_path / "x.csv", GOOD | {"config": ""}))
    assert row.config is None


def test_lookup_keys_come_from_the_caller(tmp_path):
    (row,) = published.read(write(tmp_path / "x.csv", GOOD), lambda problem: NamedInts(K=problem.shape["K"]))
    assert row.lookup_key == NamedInts(K=5120)


def test_an_unknown_arch_leaves_the_dtype_unstated(tmp_path):
    (row,) = published.read(write(tmp_path / "x.csv", GOOD | {"arch": "gfx1201"}))
    assert row.problem.fp8_dtype == "unstated"


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        ("us", "fast", "not a number"),
        ("us", "0", "not a time"),
        ("us", "nan", "not a time"),
        ("us", "1e300", "not a time"),
        ("us", "1_0", "not a time"),
        ("us", "", "not a number"),
        ("kernel", "colwse", "did you mean colwise"),
        ("kernel", "colwise\n", "unknown kernel"),
        ("arch", "../x", "unknown arch"),
        ("shape", "M=16640 K", "not name=integer"),
        ("shape", "", "shape is empty"),
        ("shape", "M=1 M=2", "twice"),
        ("shape", "M=-1", "not name=integer"),
        ("shape", f"M={2**63}", "larger than"),
        ("config", "BLOCK_SIZE=__import__('os')", "not name=integer"),
        ("config", "import=1", "not name=integer"),
        ("source", "", "source is empty"),
        ("source", "two\nlines", "control characters"),
        ("note", "x" * 501, "too long"),
        ("note", "\x1b[2J", "control characters"),
        ("device", "\u202egnp", "control characters"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, store, column, text, message):
    path = write(tmp_path / "bad.csv", GOOD, GOOD | {column: text})
    with pytest.raises(UsageError, match=message) as raised:
        import_file(store, path)
    line = str(raised.value)
    assert "\n" not in line
    assert line.startswith(f"{path} line ")
    assert store.studies() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "lacks the column source"),
        (b"source,device\n", "lacks the column arch"),
        (",".join([*COLUMNS, "us"]).encode(), "names a column twice"),
        (",".join(COLUMNS).encode() + b"\na,b\n", "line 2: 2 fields"),
        (",".join(COLUMNS).encode() + b'\n"a"b,c\n', "not CSV"),
        (",".join(COLUMNS).encode() + b'\n"a', "not CSV"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_what_is_no_csv_of_measurements_is_one_line(tmp_path, store, content, message):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        import_file(store, path)
    assert "\n" not in str(raised.value)


def test_columns_may_stand_in_any_order_beside_others(tmp_path):
    names = ["extra", *reversed(COLUMNS)]
    path = tmp_path / "x.csv"
    path.write_text(",".join(names) + "\n" + ",".join(GOOD.get(name, "x") for name in names) + "\n\n")
    assert published.read(path) == published.read(write(tmp_path / "y.csv", GOOD))


@pytest.mark.parametrize("name", ["missing.csv", "missing.db"])
def test_a_missing_file_is_one_line(tmp_path, store, name):
    with pytest.raises(UsageError, match="cannot be read"):
        import_file(store, tmp_path / name)
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / name)


def test_noise_is_no_database(tmp_path, store):
    (tmp_path / "noise.db").write_bytes(b"\x00\x01noise" * 999)
    with pytest.raises(DatabaseError, match="no fp8tune database"):
        import_file(store, tmp_path / "noise.db")
    with pytest.raises(DatabaseError, match="no fp8tune database"):
        load(tmp_path / "noise.db")


@given(st.dictionaries(st.sampled_from(COLUMNS), any_text(max_size=40)))
def test_any_text_is_a_row_or_one_line(fields):
    try:
        row = published.kernel_row({**GOOD, **fields}, lambda problem: None)
    except (Fp8tuneError, ValueError) as error:
        assert "\n" not in str(error)
    else:
        assert 0 < row.outcome.time_us <= published.LONGEST_US
