"""Published rows of whole operations: what a CSV may hold, what is stored of it, and databases from before them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from database_rows import H100, config, finished_sweep, problem
from places import PUBLISHED, PUBLISHED_OPERATIONS

from fp8tune.errors import UsageError
from fp8tune.importing import published
from fp8tune.importing.files import ImportReport, import_file, load
from fp8tune.importing.published import COLUMNS, TIMES
from fp8tune.records import Device, NamedInts, Published
from fp8tune.store.results import Store

GOOD = {
    "source": "pytorch/ao#2998",
    "device": "not stated",
    "arch": "not stated",
    "recipe": "mxfp8",
    "shape": "M=16640 N=8192 K=5120 E=16",
    "bf16_fwd_bwd_us": "4900.77",
    "scaled_fwd_bwd_us": "8091.55",
    "bf16_fwd_us": "1262.66",
    "scaled_fwd_us": "1047.7",
    "note": "before",
}


def write(path: Path, *lines: Mapping[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "results.db"), create=True) as opened:
        yield opened


def test_all_rows_are_kept_and_the_impossible_one_says_why(store: Store) -> None:
    assert import_file(store, PUBLISHED_OPERATIONS) == ImportReport(8, 0, of_operations=True)
    rows = store.published()
    assert rows == published.read_operations(PUBLISHED_OPERATIONS)
    (impossible,) = [row for row in rows if row.impossible]
    assert (impossible.shape, impossible.note) == (NamedInts(M=16640, N=8192, K=5120, E=16), "before")
    assert impossible.impossible == "scaled forward is not below forward+backward"
    assert (impossible.scaled_fwd_us, impossible.scaled_fwd_bwd_us) == (9047.7, 8091.55)
    assert {(row.source, row.device.name) for row in rows} == {("pytorch/ao#2998", "not stated")}


def test_importing_twice_doubles_nothing_and_contradictions_stay(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", GOOD, GOOD | {"scaled_fwd_us": "1050"}, GOOD | {"device": "B200"}, GOOD)
    assert import_file(store, path) == ImportReport(3, 1, of_operations=True)
    assert import_file(store, path) == ImportReport(0, 4, of_operations=True)
    assert len(store.published()) == 3


@pytest.mark.parametrize(
    ("bf16", "scaled", "impossible"),
    [
        ((1.0, 2.0), (1.0, 2.0), ""),
        ((2.0, 2.0), (1.0, 2.0), "bf16 forward is not below forward+backward"),
        ((3.0, 2.0), (5.0, 4.0), "bf16 and scaled forward is not below forward+backward"),
    ],
)
def test_what_cannot_be_right(bf16: tuple[float, float], scaled: tuple[float, float], impossible: str) -> None:
    row = Published(
        "grouped-mm", NamedInts(M=1), "mxfp8", Device("sm_100"), "s", "", bf16[0], scaled[0], bf16[1], scaled[1]
    )
    assert row.impossible == impossible
    assert row.speedup == bf16[1] / scaled[1]


def test_they_are_no_kernels_and_no_evidence(store: Store) -> None:
    import_file(store, PUBLISHED_OPERATIONS)
    assert (store.kernels(), store.arches(), store.studies(), list(store.rows())) == ([], [], [], [])


def test_a_database_brings_them_along_with_its_trials(store: Store, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "other.db"), create=True) as other:
        finished_sweep(other, {problem(): {config(32): 100.0}}, H100)
        import_file(other, PUBLISHED)
        import_file(other, PUBLISHED_OPERATIONS)
        rows, kernels = other.published(), len(other.studies())
    assert import_file(store, tmp_path / "other.db").added == len(list(store.rows())) + 8
    assert (store.published(), len(store.studies())) == (rows, kernels)
    assert import_file(store, tmp_path / "other.db").added == 0


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        *((time, "soon", "not a number") for time in TIMES),
        ("arch", "../x", "unknown arch"),
        ("shape", "nonsense", "not name=integer"),
        ("recipe", "", "not one word"),
        ("recipe", "mx fp8", "not one word"),
        ("source", " ", "source is empty"),
        ("device", "\u202egnp", "control characters"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(
    tmp_path: Path, store: Store, column: str, text: str, message: str
) -> None:
    path = write(tmp_path / "bad.csv", GOOD, GOOD | {column: text})
    for use in (load, lambda bad: import_file(store, bad)):
        with pytest.raises(UsageError, match=message) as raised:
            use(path)
        assert str(raised.value).startswith(f"{path} line ")
        assert "\n" not in str(raised.value)
    assert store.published() == []
