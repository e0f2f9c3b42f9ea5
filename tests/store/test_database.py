"""Files and URLs: what can be opened, what is refused in one line, and what a process leaves behind."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, begin, end_finals, row
from processes import together

from fp8tune.errors import DatabaseError
from fp8tune.records import Status
from fp8tune.store import database
from fp8tune.store.results import Store
from fp8tune.store.schema import METADATA, unique_names


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.db"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "results.db"
    with Store.open(str(path), create=True) as store:
        store.add_many(begin(store), (row(100.0, round=index) for index in range(2000)))
    return path


def siblings(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def change(path: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    """Change a file as another program would."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement, values if "?" in statement else ())


@pytest.mark.parametrize("name", ["results.db", "a b.db", "a?b#c%20.db", "ä.db"])
def test_the_last_of_two_writers_leaves_one_plain_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Store.open(str(path), create=True) as first:
        with Store.open(str(path)) as second:
            assert second.add(begin(second), row())
            assert len(siblings(path)) == 3
        assert first.add(begin(first), row(process="w2"))
    assert siblings(path) == [name]
    assert path.read_bytes()[18] == 1  # not WAL


def test_a_database_in_memory_lasts_until_it_is_closed() -> None:
    with Store.open("sqlite://", create=True) as store:
        assert store.add(begin(store), row())
        assert len(store.studies()) == 1


def test_reading_needs_no_right_to_write(path: Path) -> None:
    with Store.open(str(path), create=True) as store:
        store.add(begin(store), row())
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        with Store.open(str(path), writable=False) as store:
            assert len(store.studies()) == 1
            with pytest.raises(DatabaseError, match="reading only"):
                begin(store)
    finally:
        path.parent.chmod(0o755)
    assert siblings(path) == ["results.db"]


MESSAGES = {
    "missing": "does not exist: create it with fp8tune sweep",
    "folder": "is a folder",
    "noise": "is not a database",
    "empty": "is empty: run fp8tune sweep",
    "foreign": "is not a results database",
    "truncated": "is damaged|is not a",
    "newer": "newer fp8tune .schema 99",
    "no version": "development version",
    "of 0.2": "development version",
}


def break_file(case: str, path: Path, filled: Path) -> None:
    if case == "folder":
        path.mkdir()
    elif case in ("noise", "empty", "truncated"):
        content = filled.read_bytes()
        cut = content[: len(content) // 3]
        path.write_bytes({"noise": random.Random(0).randbytes(20_000), "empty": b"", "truncated": cut}[case])
    elif case in ("newer", "no version"):
        shutil.copy(filled, path)
        change(path, "UPDATE meta SET value = ?", values=("99" if case == "newer" else "new",))
    elif case == "of 0.2":
        meta = "CREATE TABLE meta AS SELECT 'schema_version' AS name, '19' AS value"
        change(path, "CREATE TABLE trials (id INTEGER)", meta)
    elif case == "foreign":
        change(path, "CREATE TABLE birds (name TEXT)")


@pytest.mark.parametrize("case", MESSAGES)
@pytest.mark.parametrize("writable", [False, True])
def test_a_file_that_is_no_database_is_one_line_and_stays(case: str, writable: bool, path: Path, filled: Path) -> None:
    break_file(case, path, filled)
    before = path.read_bytes() if path.is_file() else None
    with (
        pytest.raises(DatabaseError, match=MESSAGES[case]) as raised,
        Store.open(str(path), writable=writable) as store,
    ):
        store.studies()
    assert "\n" not in str(raised.value)
    assert (path.read_bytes() if path.is_file() else None) == before


CHANGED = {
    "problems": {"kernel": ["../../x", 'x", "'], "shape": ["M=1\nK=2"]},
    "configs": {"text": ["__import__('os').system('x')=1", "BLOCK_SIZE=99999999999999999999"]},
    "devices": {"name": ["\x1b[2J"], "arch": ["../x"]},
    "results": {"note": ["a\nb"], "status": ["fine"], "coarse_us": [50.0], "config_id": [4711], "spill_bytes": [7]},
    "studies": {"kind": ["guessed"], "bytes_moved": [1], "problem_id": [4711], "lookup_key": ["lambda=1"]},
    "trials": {"time_us": [50.0], "stage": [2], "round": [1]},
    "versions": {"axes": ["[1]"]},
    "calibrations": {"value": [4000.0]},
    "study_runs": {"tie_band": [0.5]},
}


@pytest.mark.parametrize("table", CHANGED)
def test_a_row_that_was_changed_behind_our_back_is_found(path: Path, table: str) -> None:
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        store.record_ceiling(sweep, H100, 3000.0)
        store.add_many(sweep, [row(100.0), row(101.0, stage="final"), row(102.0, stage="final", process="w2")])
        end_finals(store, sweep)
    content, where = path.read_bytes(), "stage = 1 AND process_id = 1" if table == "trials" else "true"
    for column, value in ((column, value) for column, values in CHANGED[table].items() for value in values):
        path.write_bytes(content)
        ignoring = "PRAGMA ignore_check_constraints = ON"
        change(path, ignoring, f"UPDATE {table} SET {column} = ? WHERE {where}", values=(value,))
        with Store.open(str(path), writable=False) as store:
            with pytest.raises(DatabaseError) as raised:
                store.studies()
            assert "\n" not in str(raised.value)
            assert store.integrity(), (column, value)


def test_a_trial_that_nobody_could_read_is_not_stored(each_database: str) -> None:
    with Store.open(each_database, create=True) as store:
        sweep, good = begin(store), row(100.0)
        for values in (
            {"time_us": math.inf},
            {"time_us": -1.0},
            {"time_us": 0.0},
            {"status": Status.WRONG, "reason": "differs"},  # a config that failed has no time
            {"status": Status.CRASHED, "time_us": None},  # and must have a reason
            {"status": "unknown"},
        ):
            bad = replace(good, round=1, outcome=replace(good.outcome, **values))
            with pytest.raises(DatabaseError, match="was not stored"):
                store.add_many(sweep, [good, bad])
        assert store.studies() == []
        assert store.add(sweep, good)  # ids of what was rolled back are forgotten


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW calibrations AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
        "CREATE VIRTUAL TABLE calibrations USING fts5(x)",
        "CREATE TRIGGER evil AFTER INSERT ON calibrations BEGIN DELETE FROM results; END",
    ],
)
def test_a_name_of_ours_that_runs_what_the_file_says_is_refused(path: Path, statement: str) -> None:
    Store.open(str(path), create=True).close()
    change(path, *([] if "TRIGGER" in statement else ["DROP TABLE calibrations"]), statement)
    for writable in (False, True):
        with pytest.raises(DatabaseError, match="calibrations is not a plain table"):
            Store.open(str(path), writable=writable)


def test_the_log_of_another_file_is_found(path: Path, filled: Path) -> None:
    shutil.copy(filled, path)
    with contextlib.closing(sqlite3.connect(path.with_name("other.db"))) as neighbour:
        neighbour.execute("PRAGMA journal_mode = WAL")
        neighbour.execute("CREATE TABLE birds (name TEXT)")
        shutil.copy(path.with_name("other.db-wal"), path.with_name("results.db-wal"))
    before = path.read_bytes()
    with pytest.raises(database.ForeignLogError, match="was replaced"):
        Store.open(str(path))
    assert path.read_bytes() == before


def test_rows_of_a_file_that_was_replaced_while_in_use_are_saved(path: Path, filled: Path) -> None:
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        assert store.add(sweep, row())
        path.unlink()
        shutil.copy(filled, path)
        before = path.read_bytes()
        with pytest.raises(DatabaseError, match=r"every row stored before is in .*results\.db\.saved1"):
            store.add(sweep, row(round=1))
    assert path.read_bytes() == before
    with Store.open(f"{path}.saved1", writable=False) as saved:
        assert [stored.round for stored in saved.rows()] == [0]


def test_what_a_killed_process_left_is_taken_in_by_the_next_one(path: Path) -> None:
    Store.open(str(path), create=True).close()

    def work(index: int) -> None:
        store = Store.open(str(path))
        store.add(begin(store), row())
        os.kill(os.getpid(), signal.SIGKILL)

    assert together(1, work) == [-signal.SIGKILL]
    assert len(siblings(path)) == 3
    with Store.open(str(path)) as store:  # finds nothing to do
        assert len(store.studies()) == 1
    assert siblings(path) == ["results.db"]


SWITCH = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1], timeout=0).execute('PRAGMA journal_mode=DELETE'))"


def test_another_process_cannot_remove_the_log_of_a_database_that_is_opened_twice(path: Path) -> None:
    """A process had the same file open twice; another one that ended then removed the log."""
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        assert store.add(sweep, row())
        with Store.open(str(path)):
            command = [sys.executable, "-c", SWITCH, str(path)]
            assert "is locked" in subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert store.add(sweep, row(round=1))
    with Store.open(str(path), writable=False) as store:
        assert len(list(store.rows())) == 2


def test_a_locked_database_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            with pytest.raises(DatabaseError, match="locked by another process"):
                store.add(sweep, row())
            holder.execute("ROLLBACK")
        assert store.add(sweep, row())


@pytest.mark.parametrize(
    "url",
    [
        "/nowhere/results.db",
        "sqlite:////nowhere/results.db",
        "/proc/results.db",
        "://",
        "nosuch://host/db",
        "mysql+nosuch://user:secret@host/db",
        "mariadb+pymysql://user:secret@host/db",
        "postgresql+asyncpg://user:secret@host/db",
        "sqlite+pysqlcipher://:secret@/results.db",
    ],
)
def test_a_place_that_cannot_be_used_is_one_line_without_its_password(url: str) -> None:
    tested = "results.db" if "/results.db" in url and "secret" not in url else r"tested are SQLite .* and PostgreSQL"
    with pytest.raises(DatabaseError, match=tested) as raised:
        Store.open(url, create=True)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("table", METADATA.sorted_tables, ids=str)
def test_every_row_has_an_identity_without_nulls(table) -> None:
    names = unique_names(table)
    assert names
    assert "id" not in names
    assert not any(table.c[name].nullable for name in names)
