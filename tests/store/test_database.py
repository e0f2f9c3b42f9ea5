from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest
from database_rows import H100, begin, config, row

from fp8tune.errors import DatabaseError
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
            assert len(store.evidence()) == 1
            with pytest.raises(DatabaseError, match="reading only"):
                begin(store)
    finally:
        path.parent.chmod(0o755)
    assert siblings(path) == ["results.db"]


MESSAGES = {
    "missing": "does not exist: run fp8tune sweep",
    "folder": "is a folder",
    "noise": "is not a database",
    "empty": "is empty: run fp8tune sweep",
    "foreign": "is not a results database",
    "truncated": "is damaged|is not a",
    "newer": "newer fp8tune .schema 99",
    "no version": "no schema version",
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
        store.evidence()
    assert "\n" not in str(raised.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def _open_and_read(path: Path, writable: bool) -> None:
    with Store.open(str(path), writable=writable) as store:
        store.evidence()


def test_a_page_of_noise_is_one_line(path, filled):
    content = bytearray(filled.read_bytes())
    content[4096 * 3 :] = random.Random(0).randbytes(len(content) - 4096 * 3)
    path.write_bytes(content)
    with pytest.raises(DatabaseError) as raised, Store.open(str(path), writable=False) as store:
        store.evidence()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("problems", "kernel", "../../x"),
        ("problems", "kernel", 'x", "'),
        ("problems", "shape", "M=1\nK=2"),
        ("configs", "items", "__import__('os').system('x')=1"),
        ("configs", "items", "BLOCK_SIZE=99999999999999999999"),
        ("lookup_keys", "items", "lambda=1"),
        ("devices", "name", "\x1b[2J"),
        ("devices", "arch", "../x"),
        ("candidates", "note", "a\nb"),
        ("candidates", "kind", "guessed"),
        ("candidates", "bytes_moved", "many"),
        ("candidates", "spill_bytes", "none"),
        ("trials", "status", "fine"),
        ("trials", "time_us", "fast"),
        ("trials", "time_us", float("inf")),
        ("trials", "time_us", -1.0),
        ("trials", "created_at", "yesterday"),
        ("trials", "candidate_id", 4711),
        ("candidates", "problem_id", 4711),
        ("kernel_versions", "axes", "[1]"),
        ("calibrations", "value", "high"),
    ],
)
def test_hostile_content_is_named_and_left_out(path, table, column, value, caplog):
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        store.record_ceiling(sweep, H100, 3000.0)
        store.add(sweep, row(100.0))
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE {table} SET {column}=?", (value,))
    connection.commit()
    connection.close()
    with Store.open(str(path), writable=False) as store:
        found = store.evidence()
        list(store.rows())
        assert len(store.unreadable()) == 1
    assert len(found) == (table == "calibrations")
    assert all("\n" not in message for message in caplog.messages)
    if value != 4711 or table != "trials":  # a trial of nothing is met by nothing
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith(f"left out {'problems' if value == 4711 else table}:")
    with Store.open(str(path)) as store:
        store.forget(store.unreadable())
        assert not store.unreadable()
        assert store.add(begin(store), row(100.0, config=config(128)))
        assert len(store.evidence()) == 1 + (table == "calibrations")


def test_a_locked_database_is_one_line(path):
    Store.open(str(path), create=True).close()
    impatient = database.connect(str(path), create=False, writable=True, patience_s=0.05)
    with Store(impatient, writable=True) as store:
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


def test_urls_and_paths_open_the_same_file(path):
    with Store.open(f"sqlite:///{path}", create=True) as store:
        store.add(begin(store), row())
    with Store.open(str(path)) as store:
        assert len(store.evidence()) == 1


@pytest.mark.parametrize("name", ["a b.db", "a?b#c%20.db", "ä.db"])
def test_odd_file_names_work(tmp_path, name):
    with Store.open(str(tmp_path / name), create=True) as store:
        begin(store)
    assert siblings(tmp_path / name) == [name]
