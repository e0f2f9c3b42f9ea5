"""Which database a command takes that is not told: nothing is written into a file that git tracks."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import config, finished_sweep, problem
from places import ROOT

from fp8tune.commands.options import database_to_read, database_to_write
from fp8tune.errors import UsageError
from fp8tune.store.results import Store

SWEEP = ("sweep", "--kernel", "rowwise-2d", "--shapes", "tiny", "--timer", "simulated:1", "--quick")
SMALL = ("--grid", "BLOCK_SIZE=1", "--grid", "num_warps=8", "--grid", "num_stages=1")


def git(*arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a committed ``results.db`` of one problem, and the ignored files of this one."""
    monkeypatch.chdir(tmp_path)
    with Store.open("results.db", create=True) as store:
        finished_sweep(store, {problem(K=1024): {config(32): 100.0, config(64): 120.0}})
    shutil.copy(ROOT / ".gitignore", tmp_path)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "rows")
    return tmp_path


def test_commands_that_write_leave_the_committed_database_as_it_is(checkout: Path) -> None:
    done = fp8tune(*SWEEP, *SMALL)
    assert done.returncode == 0
    assert "rows go into fp8tune.db; results.db stays as it is" in done.stderr
    assert fp8tune("import", str(ROOT / "sweeps" / "published" / "grouped_mm.csv")).returncode == 0
    assert git("status", "--porcelain") == ""
    assert (checkout / "fp8tune.db").exists()
    again = fp8tune(*SWEEP, *SMALL)
    assert again.returncode == 0
    assert "every trial of this sweep is in the database" in again.stderr


def test_a_sweep_writes_into_what_it_is_told(checkout: Path) -> None:
    assert fp8tune(*SWEEP, *SMALL, "--db", "results.db").returncode == 0
    assert git("status", "--porcelain").split() == ["M", "results.db"]
    assert not (checkout / "fp8tune.db").exists()


def test_a_tracked_database_is_written_only_if_it_is_named(checkout: Path) -> None:
    shutil.copy("results.db", "fp8tune.db")
    git("add", "--force", "fp8tune.db")
    before = (checkout / "fp8tune.db").read_bytes()
    said = "fp8tune: git tracks fp8tune.db: write into it with --db fp8tune.db, or into another with --db PATH\n"
    assert fp8tune(*SWEEP, *SMALL) == (2, "", said)
    assert (checkout / "fp8tune.db").read_bytes() == before
    assert database_to_write("fp8tune.db") == "fp8tune.db"


def test_commands_that_read_take_ones_own_rows_else_the_committed_ones(checkout: Path) -> None:
    code, out, error = fp8tune("show", "--format", "json")
    assert (code, len(json.loads(out)), error) == (0, 1, "")
    Store.open("fp8tune.db", create=True).close()
    code, out, error = fp8tune("show", "--format", "json")
    assert (code, json.loads(out)) == (0, [])
    assert error == "rows are those of fp8tune.db; --db results.db reads the committed ones\n"
    assert fp8tune("export", "--arch", "sm_90", "--output", "t.py", "--db", "results.db").returncode == 0


def test_without_any_database_reading_names_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert database_to_read(None) == "fp8tune.db"
    assert database_to_read("other.db") == "other.db"
    assert database_to_write(None) == "fp8tune.db"  # no repository


def test_the_default_database_of_this_repository_is_ignored() -> None:
    done = subprocess.run(
        ["git", "check-ignore", "fp8tune.db", "fp8tune.db-wal", "results.db"], cwd=ROOT, capture_output=True
    )
    assert done.stdout.split() == [b"fp8tune.db", b"fp8tune.db-wal"]


def test_a_tracked_default_is_an_error_of_the_user(checkout: Path) -> None:
    git("mv", "results.db", "fp8tune.db")
    with pytest.raises(UsageError, match="git tracks"):
        database_to_write(None)
