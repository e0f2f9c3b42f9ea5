from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, begin, end_finals, row
from processes import together

from fp8tune.errors import DatabaseError
from fp8tune.records import Status
from fp8tune.store import database
from fp8tune.store.results import Store


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.db"


def siblings(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def test_closing_leaves_one_plain_file(path):
    with Store.open(str(path), create=True) as store:
        begin(store)
        assert len(siblings(path)) == 3
    assert siblings(path) == ["results.db"]
    assert path.read_bytes()[18] == 1  # not WAL


def test_the_last_of_two_writers_cleans_up(path):
    with Store.open(str(path), create=True) as first:
        with Store.open(str(path)) as second:
            assert second.add(begin(second), row())
        assert first.add(begin(first), row(process="w2"))
    assert siblings(path) == ["results.db"]


def test_reading_needs_no_right_to_write(path):
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
    "old": "development version",
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    path = tmp_path_factory.mktemp("filled") / "results.db"
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        store.add_many(sweep, (row(100.0, round=index) for index in range(2000)))
    return path


def broken(case: str, path: Path, filled: Path) -> None:
    content = filled.read_bytes()
    if case == "folder":
        path.mkdir()
    elif case == "noise":
        path.write_bytes(random.Random(0).randbytes(20_000))
    elif case == "empty":
        path.write_bytes(b"")
    elif case == "truncated":
        path.write_bytes(content[: len(content) // 3])
    elif case in ("newer", "no version"):
        shutil.copy(filled, path)
        connection = sqlite3.connect(path)
        connection.execute("UPDATE meta SET value=?", ("99" if case == "newer" else "new",))
        connection.commit()
        connection.close()
    elif case == "old":  # of fp8tune 0.2
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE trials (id INTEGER)")
        connection.execute("CREATE TABLE meta AS SELECT 'schema_version' AS name, '19' AS value")
        connection.commit()
        connection.close()
    elif case == "foreign":
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE birds (name TEXT)")
        connection.close()


@pytest.mark.parametrize("case", MESSAGES)
@pytest.mark.parametrize("writable", [False, True])
def test_a_file_that_is_no_database_is_one_line(case, writable, path, filled):
    broken(case, path, filled)
    before = path.read_bytes() if path.is_file() else None
    with (
        pytest.raises(DatabaseError, match=MESSAGES[case]) as raised,
        Store.open(str(path), writable=writable) as store,
    ):
        store.studies()
    assert "\n" not in str(raised.value)
    assert (path.read_bytes() if path.is_file() else None) == before


HOSTILE = [
    ("problems", "kernel", "../../x"),
    ("problems", "kernel", 'x", "'),
    ("problems", "shape", "M=1\nK=2"),
    ("configs", "text", "__import__('os').system('x')=1"),
    ("configs", "text", "BLOCK_SIZE=99999999999999999999"),
    ("studies", "lookup_key", "lambda=1"),
    ("devices", "name", "\x1b[2J"),
    ("devices", "arch", "../x"),
    ("results", "note", "a\nb"),
    ("results", "status", "fine"),
    ("results", "coarse_us", 50.0),
    ("results", "config_id", 4711),
    ("results", "spill_bytes", 7),
    ("studies", "kind", "guessed"),
    ("studies", "bytes_moved", 1),
    ("studies", "problem_id", 4711),
    ("trials", "time_us", 50.0),
    ("trials", "stage", 2),
    ("trials", "round", 1),
    ("versions", "axes", "[1]"),
    ("calibrations", "value", 4000.0),
    ("study_runs", "tie_band", 0.5),
]


@pytest.mark.parametrize(("table", "column", "value"), HOSTILE)
def test_a_row_that_was_changed_behind_our_back_is_named(path, table, column, value):
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        store.record_ceiling(sweep, H100, 3000.0)
        store.add_many(sweep, [row(100.0), row(101.0, stage="final"), row(102.0, stage="final", process="w2")])
        end_finals(store, sweep)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        where = "stage = 1 AND process_id = 1" if table == "trials" else "true"
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value,))
    with Store.open(str(path), writable=False) as store:
        with pytest.raises(DatabaseError) as raised:
            store.studies()
        assert "\n" not in str(raised.value)
        assert store.integrity()


@pytest.mark.parametrize(
    "change",
    [
        {"time_us": math.inf},
        {"time_us": -1.0},
        {"time_us": 0.0},
        {"status": Status.WRONG, "reason": "differs"},  # a config that failed has no time
        {"status": Status.CRASHED, "time_us": None},  # and must have a reason
        {"status": "unknown"},
    ],
)
def test_a_trial_that_nobody_could_read_is_not_stored(each_database, change):
    with Store.open(each_database, create=True) as store:
        sweep, good = begin(store), row(100.0)
        bad = replace(good, round=1, outcome=replace(good.outcome, **change))
        with pytest.raises(DatabaseError, match="was not stored"):
            store.add_many(sweep, [good, bad])
        assert store.studies() == []


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW {} AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
        "CREATE VIRTUAL TABLE {} USING fts5(x)",
    ],
)
def test_a_name_of_ours_that_is_no_table_is_refused(path, statement):
    Store.open(str(path), create=True).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE calibrations")
        connection.execute(statement.format("calibrations"))
    for writable in (False, True):
        with pytest.raises(DatabaseError, match="calibrations is not a plain table"):
            Store.open(str(path), writable=writable)


def test_a_file_with_a_trigger_is_refused(path):
    Store.open(str(path), create=True).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TRIGGER evil AFTER INSERT ON trials BEGIN DELETE FROM results; END")
    with pytest.raises(DatabaseError, match="trials is not a plain table"):
        Store.open(str(path))


def test_the_log_of_another_file_is_found(path, filled):
    shutil.copy(filled, path)
    with contextlib.closing(sqlite3.connect(path.with_name("other.db"))) as neighbour:
        neighbour.execute("PRAGMA journal_mode = WAL")
        neighbour.execute("CREATE TABLE birds (name TEXT)")
        shutil.copy(path.with_name("other.db-wal"), path.with_name("results.db-wal"))
    before = path.read_bytes()
    with pytest.raises(database.ForeignLogError, match="was replaced"):
        Store.open(str(path))
    assert path.read_bytes() == before


def test_what_a_killed_process_left_is_taken_in_by_the_next_one(path):
    Store.open(str(path), create=True).close()

    def work(index):
        store = Store.open(str(path))
        store.add(begin(store), row())
        os.kill(os.getpid(), signal.SIGKILL)

    assert together(1, work) == [-signal.SIGKILL]
    assert len(siblings(path)) == 3
    with Store.open(str(path)) as store:  # finds nothing to do
        assert len(store.studies()) == 1
    assert siblings(path) == ["results.db"]


def test_a_locked_database_is_one_line(path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match="locked by another process"):
            store.add(sweep, row())
        holder.execute("ROLLBACK")
        holder.close()
        assert store.add(sweep, row())


@pytest.mark.parametrize("url", ["/nowhere/results.db", "sqlite:////nowhere/results.db", "/proc/results.db"])
def test_a_place_that_cannot_be_written_is_one_line(url):
    with pytest.raises(DatabaseError) as raised:
        Store.open(url, create=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://host/db",
        "mysql+nosuch://host/db",
        "mysql://user:secret@host/db",
        "mariadb+pymysql://user:secret@host/db",
        "mssql+pyodbc://user:secret@host/db",
        "postgresql+asyncpg://user:secret@host/db",
        "sqlite+pysqlcipher://:secret@/results.db",
        "://",
        "oracle://user:secret@host/db",
    ],
)
def test_a_url_that_cannot_be_used_is_one_line_without_its_password(url):
    with pytest.raises(DatabaseError, match=r"tested are SQLite .* and PostgreSQL") as raised:
        Store.open(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["a b.db", "a?b#c%20.db", "ä.db"])
def test_odd_file_names_work(tmp_path, name):
    with Store.open(str(tmp_path / name), create=True) as store:
        begin(store)
    assert siblings(tmp_path / name) == [name]
