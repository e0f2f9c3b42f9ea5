"""Databases without ``--db``: ``$FP8TUNE_DB`` or ``./fp8tune.db``, read with the results that come with fp8tune."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import H100, begin, config, finished_sweep, problem, row
from places import PUBLISHED, ROOT

from fp8tune.errors import UsageError
from fp8tune.records import Kind
from fp8tune.store import location
from fp8tune.store.results import Store

SWEEP = ("sweep", "--kernel", "rowwise-2d", "--shapes", "tiny", "--timer", "simulated:1", "--quick")
SMALL = ("--grid", "BLOCK_SIZE=1", "--grid", "num_warps=8", "--grid", "num_stages=1")


def git(*arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def filled(path: Path | str, times: dict[int, float]) -> None:
    """Make a database with one config on each of some sizes: K -> microseconds."""
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(K=K): {config(32): time_us} for K, time_us in times.items()})


def shown(*options: str) -> dict[int, float]:
    """Return K -> the time of the pick."""
    code, out, error = fp8tune("show", "colwise", "--format", "json", *options)
    assert code == 0, error
    return {row["size"]["K"]: row["time_us"] for row in json.loads(out)["picks"]}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results that come with fp8tune: two sizes. Commands run in an empty folder, and no variable names a database."""
    path = tmp_path / "base.db"
    filled(path, {1024: 100.0, 2048: 200.0})
    monkeypatch.delenv(location.VARIABLE)
    monkeypatch.setenv(location.BASE_VARIABLE, str(path))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return path


@pytest.fixture
def checkout(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose committed ``results.db`` comes with fp8tune."""
    filled("results.db", {1024: 100.0})
    monkeypatch.setenv(location.BASE_VARIABLE, "results.db")
    shutil.copy(ROOT / ".gitignore", ".")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "results")
    return Path.cwd()


def test_own_results_win_and_db_reads_one_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown() == {1024: 100.0, 2048: 200.0}
    filled("fp8tune.db", {1024: 90.0})
    assert shown() == {1024: 90.0, 2048: 200.0}
    assert shown("--db", "fp8tune.db") == {1024: 90.0}
    filled("mine.db", {2048: 50.0})
    monkeypatch.setenv(location.VARIABLE, "mine.db")
    assert shown() == {1024: 100.0, 2048: 50.0}


def test_what_was_only_compiled_is_shown_beside_results_that_come_with_fp8tune(base: Path) -> None:
    """Its device was unknown: the next command of ``sweep --arch`` failed in every folder without ``--db``."""
    compiled = replace(H100, arch="gfx942", name="")
    with Store.open("fp8tune.db", create=True) as store:
        store.add(begin(store, compiled), row(None, kind=Kind.STATIC, device=compiled))
    done = fp8tune("show", "colwise", "--device", "gfx942")
    assert (done.returncode, done.stdout.split()[-4:]) == (0, ["1", "1", "1", "1"]), done
    assert fp8tune("show", "colwise", "--device", "gfx90a").returncode == 2


@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("export", "--arch", "sm_90", "--allow-quick", "-o", "table.py"),
        ("compare", "HEAD..HEAD", "--kernel", "colwise"),
        ("doctor",),
    ],
    ids=lambda command: command[0],
)
def test_reading_makes_and_changes_no_database(base: Path, command: tuple[str, ...]) -> None:
    before = base.read_bytes()
    assert "Traceback" not in fp8tune(*command).stderr
    assert not list(Path.cwd().glob("*.db*"))
    assert base.read_bytes() == before


@pytest.mark.parametrize("variable", [None, "mine.db"])
def test_a_sweep_writes_ones_own_database(base: Path, variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable:
        monkeypatch.setenv(location.VARIABLE, variable)
    before = base.read_bytes()
    done = fp8tune(*SWEEP, *SMALL)
    assert (done.returncode, "fp8tune show rowwise-2d --device simulated" in done.stdout) == (0, True)
    assert base.read_bytes() == before
    with Store.open(variable or "fp8tune.db", writable=False) as store:
        assert store.kernels() == ["rowwise-2d"]


def test_the_committed_database_is_written_only_if_it_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8tune(*SWEEP, *SMALL).returncode == 0
    assert fp8tune("db", "import", PUBLISHED).returncode == 0
    assert fp8tune("db", "forget", "rowwise-2d", "--yes").returncode == 0
    assert git("status", "--porcelain") == ""
    monkeypatch.setenv(location.VARIABLE, "results.db")
    code, out, error = fp8tune(*SWEEP, *SMALL)
    assert (code, out, "write into it with --db results.db" in error) == (2, "", True)
    assert fp8tune(*SWEEP, *SMALL, "--db", "results.db").returncode == 0
    assert git("status", "--porcelain").split() == ["M", "results.db"]


def test_a_tracked_database_is_written_only_if_it_is_named(checkout: Path) -> None:
    shutil.copy("results.db", "fp8tune.db")
    git("add", "--force", "fp8tune.db")
    before = Path("fp8tune.db").read_bytes()
    code, out, error = fp8tune(*SWEEP, *SMALL)
    assert (code, out, "git tracks fp8tune.db: write into it with --db fp8tune.db" in error) == (2, "", True)
    assert Path("fp8tune.db").read_bytes() == before


def test_without_any_database_an_error_names_ones_own(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(location.BASE_VARIABLE, "")
    done = fp8tune("show")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fp8tune: fp8tune.db does not exist: create it with fp8tune sweep --db fp8tune.db")


def test_shipped_results_that_cannot_be_read_are_left_out_beside_own_ones(base: Path) -> None:
    base.write_bytes(b"SQLite format 3\0" + bytes(5000))
    assert fp8tune("show").returncode == 2
    filled("fp8tune.db", {1024: 90.0})
    assert shown() == {1024: 90.0}


def test_a_variable_that_names_a_database_in_memory_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(location.VARIABLE, ":memory:")
    with pytest.raises(UsageError, match="gone when the command ends"):
        location.to_write(None)


def test_databases_of_users_are_ignored_in_this_repository() -> None:
    strays = ["fp8tune.db", "fp8tune.db-wal", "results.db-journal", "results.db.saved", "docs/try.db", "rows.db.xz"]
    done = subprocess.run(["git", "check-ignore", *strays, "results.db"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == strays
    assert os.path.exists(ROOT / "results.db")
