"""Recorded launches, flops and checks: kept, merged, and absent from databases of before."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from database_rows import KERNEL, begin, config, finished_sweep, problem, row
from servers import on_both

from fp8tune.errors import DatabaseError
from fp8tune.records import Evidence, NamedInts, Problem
from fp8tune.store.importing import import_file
from fp8tune.store.results import Store
from fp8tune.store.schema import OPTIONAL

NAMES = {table.name for table in OPTIONAL}
RECORDED = Problem("torchao.kernels:_kernel", NamedInts(n_rows=7), "none", "recorded-0123456789ab", fp8_dtype="")


def document(count: int = 1) -> str:
    return json.dumps({"kernel": {"name": RECORDED.kernel}, "launch": {"count": count}})


def filled(store: Store, *, count: int = 1, flops: int = 64, check: str = "exact-inputs") -> None:
    finished_sweep(store, {problem(): {config(): 100.0}, problem(K=1024): {config(): 50.0}})
    store.record_launches({RECORDED: document(count)})
    store.record_flops({problem(): flops})
    store.record_check(begin(store, request="another"), KERNEL, check)


def tables_of(path: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def execute(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def db(database: str) -> str:
    with Store.open(database, create=True) as store:
        filled(store)
    return database


@pytest.fixture
def path(db: str) -> Path:
    """That of a file."""
    return Path(db)


@pytest.fixture
def older(path: Path) -> Path:
    """The same database without the tables."""
    execute(path, *(f"DROP TABLE {name}" for name in NAMES))
    return path


def facts(db: str | Path) -> tuple[dict[Problem, str], dict[int, tuple[int | None, str]]]:
    with Store.open(str(db), writable=False) as store:
        by_k = {item.problem.shape["K"]: (item.flops, item.check) for item in evidence(store)}
        return store.recorded_launches(), by_k


def evidence(store: Store) -> list[Evidence]:
    return store.evidence(kernel="colwise")


@on_both
def test_what_was_recorded_is_read(db: str) -> None:
    with Store.open(db) as store:
        assert store.recorded_launches() == store.recorded_launches(RECORDED.kernel) == {RECORDED: document()}
        assert store.recorded_launches("colwise") == {}
        assert {item.problem: item.flops for item in evidence(store)} == {problem(): 64, problem(K=1024): None}
        store.record_launches({RECORDED: document(2), problem(): document()})
        store.record_flops({problem(): 128, problem(K=1024): 0})
        assert store.recorded_launches() == {RECORDED: document(2), problem(): document()}
        assert {item.flops for item in evidence(store)} == {128, 0}


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([None], "exact"),
        (["exact-inputs"], "exact-inputs"),
        (["exact-inputs", None], "exact-inputs"),
        (["tolerance 1e-3 of float64", "exact"], "tolerance 1e-3 of float64"),
    ],
)
def test_a_row_says_the_least_strict_check_of_its_sweeps(
    tmp_path: Path, checks: list[str | None], expected: str
) -> None:
    with Store.open(str(tmp_path / "results.db"), create=True) as store:
        for number, check in enumerate(checks):
            sweep = begin(store, request=f"request {number}")
            store.add(sweep, row(100.0, round=number))
            if check:
                store.record_check(sweep, KERNEL, "exact")
                store.record_check(sweep, KERNEL, check)  # the newest of a sweep that goes on counts
        assert [item.check for item in evidence(store)] == [expected]


def test_a_database_without_them_is_read_as_if_they_were_empty(older: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = older.read_bytes()
    with Store.open(str(older), writable=False) as store:
        assert store.recorded_launches() == {}
        assert {(item.flops, item.check) for item in evidence(store)} == {(None, "exact")}
        assert (store.unreadable(), store.integrity()) == ({}, [])
        assert next(store.rows())
    assert (older.read_bytes(), caplog.text) == (before, "")
    assert [file.name for file in older.parent.iterdir()] == [older.name]


def test_the_next_write_makes_them(older: Path) -> None:
    with Store.open(str(older)) as store:
        assert store.recorded_launches() == {}
    assert not NAMES & tables_of(older)
    with Store.open(str(older)) as store, contextlib.suppress(DatabaseError):
        store.record_launches({RECORDED: "{"})  # refused: nothing is written
    assert not NAMES & tables_of(older)
    with Store.open(str(older)) as store:
        store.record_launches({RECORDED: document()})
        assert store.recorded_launches() == {RECORDED: document()}
    assert tables_of(older) >= NAMES


@on_both
def test_an_import_brings_them_along(database: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.db"
    with Store.open(str(theirs), create=True) as store:
        filled(store)
    with Store.open(database, create=True) as store:
        assert import_file(store, theirs).added == 2
        assert import_file(store, theirs).added == 0
    assert facts(database) == facts(theirs)


@on_both
def test_a_problem_that_is_forgotten_takes_them_along(db: str) -> None:
    with Store.open(db) as store:
        store.forget([("problems", 3)])
        assert store.recorded_launches() == {}
        assert store.unreadable() == {}
