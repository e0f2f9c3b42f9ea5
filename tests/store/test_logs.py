"""A log that was left beside a file that has been replaced since: refused, set aside, its rows put back."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from database_rows import begin, row

from fp8tune.check import doctor, stored
from fp8tune.check.finding import Level
from fp8tune.check.repair import repair
from fp8tune.errors import DatabaseError
from fp8tune.store import logs
from fp8tune.store.results import Store


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.fsync=none")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def add(path: Path, *processes: str) -> None:
    with Store.open(str(path), create=True) as store:
        store.add_many(begin(store), (row(process=process) for process in processes))


def commit(path: Path, message: str) -> None:
    git(path.parent, "add", path.name)
    git(path.parent, "commit", "-q", "-m", message)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a database with one row, committed, then with a second one, committed."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q")
    path = folder / "results.db"
    add(path, "first")
    commit(path, "one")
    add(path, "second")
    commit(path, "two")
    return folder


@pytest.fixture
def path(repository: Path, tmp_path: Path) -> Path:
    """The database in a copy of it."""
    return Path(shutil.copytree(repository, tmp_path / "repository")) / "results.db"


def kill_a_writer(path: Path, rows: int = 20, go_on: Callable[[], None] = lambda: None) -> None:
    """kill -9 of a process that has stored rows; ``go_on``: what happens to the file before."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        store = Store.open(str(path))
        sweep = begin(store, request="killed")
        for number in range(rows):
            store.add(sweep, row(process=f"killed {number}"))
        os.write(writer, b".")
        signal.pause()
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        assert said.read(1) == b"."
    go_on()
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def processes(path: Path) -> set[str]:
    with Store.open(str(path), writable=False) as store:
        assert store.integrity() == []
        return {found.process for found in store.rows()}


KILLED = {f"killed {number}" for number in range(20)}
REPLACED = {
    "checkout": lambda path: git(path.parent, "checkout", "HEAD", "--", path.name),
    "reset": lambda path: git(path.parent, "reset", "-q", "--hard", "HEAD~1"),
    "switch": lambda path: git(path.parent, "switch", "-q", "-f", "--detach", "HEAD~1"),
    "copy": lambda path: shutil.copy(copy_of(path), path),
}


def copy_of(path: Path) -> Path:
    """Another database altogether, of the same schema."""
    other = path.with_name("other.db")
    add(other, *(f"other {number}" for number in range(300)))
    return other


@pytest.mark.parametrize("how", REPLACED)
def test_a_replaced_file_beside_the_log_of_a_killed_writer(path: Path, how: str) -> None:
    kill_a_writer(path)
    assert Path(f"{path}-wal").exists()
    REPLACED[how](path)
    replaced = path.read_bytes()
    for writable in (False, True):
        with pytest.raises(DatabaseError, match=r"was replaced .* fp8tune doctor --repair --db") as raised:
            Store.open(str(path), writable=writable)
        assert "\n" not in str(raised.value)
    (finding,) = doctor.check_database(str(path))
    assert (finding.level, finding.fix) == (Level.ERROR, f"run fp8tune doctor --repair --db {path}")
    assert path.read_bytes() == replaced  # nothing was written into it
    assert [found.level for found in repair(str(path))] == [Level.OK, Level.OK]
    assert processes(path) >= KILLED
    assert "first" in processes(path) or how == "copy"
    (left,) = path.parent.glob("*.left-behind")
    assert (left / path.name).read_bytes() == replaced
    assert (left / f"{path.name}-wal").stat().st_size > 0
    assert not logs.beside(path)


def test_the_log_of_the_file_itself_is_taken_in(path: Path) -> None:
    kill_a_writer(path)
    with Store.open(str(path), writable=False) as store:
        found = stored.check_store(str(path), store)
    assert any("holds rows that are not in" in finding.what for finding in found)
    assert [found.level for found in repair(str(path))] == [Level.OK]
    assert processes(path) == {"first", "second", *KILLED}
    assert not logs.beside(path)


def test_a_file_that_is_replaced_under_a_writer_costs_no_row(path: Path) -> None:
    with Store.open(str(path)) as store:
        sweep = begin(store)
        store.add(sweep, row(process="mine"))
        REPLACED["reset"](path)
        with pytest.raises(DatabaseError, match=r"was replaced or removed .*fp8tune import"):
            store.add(sweep, row(process="too late"))
    assert processes(path) == {"first"}
    assert processes(path.with_name("results.db.saved")) == {"first", "second", "mine"}
    assert not logs.beside(path)


def test_the_log_of_a_process_that_still_runs_is_left_alone(path: Path) -> None:
    def replace() -> None:
        REPLACED["reset"](path)
        with pytest.raises(DatabaseError, match="while a process writes to it"):
            repair(str(path))

    kill_a_writer(path, go_on=replace)
    assert [found.level for found in repair(str(path))] == [Level.OK, Level.OK]
    assert processes(path) >= KILLED


def kill_in_a_rollback_journal(path: Path) -> None:
    """As a foreign program leaves it, or a kill in the moment that a database is made or closed."""
    process = os.fork()
    if process == 0:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA cache_size=1")  # spill: the file changes before the commit
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE bulk (data)")
        connection.executemany("INSERT INTO bulk VALUES (?)", ((bytes(3000),) for _ in range(50)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)


def test_a_rollback_journal_of_the_file_itself_is_rolled_back(path: Path) -> None:
    kill_in_a_rollback_journal(path)
    assert Path(f"{path}-journal").stat().st_size > 512
    assert logs.foreign(path) is None
    add(path, "third")
    assert processes(path) == {"first", "second", "third"}
