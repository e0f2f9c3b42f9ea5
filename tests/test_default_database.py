"""Which databases a command takes that is not told: own rows over those that come with fp8tune, which none writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import config, finished_sweep, problem
from places import ROOT

from fp8tune.errors import UsageError
from fp8tune.report import html
from fp8tune.store import location
from fp8tune.store.results import Store

SWEEP = ("sweep", "--kernel", "rowwise-2d", "--shapes", "tiny", "--timer", "simulated:1", "--quick")
SMALL = ("--grid", "BLOCK_SIZE=1", "--grid", "num_warps=8", "--grid", "num_stages=1")
SHOW = ("show", "colwise", "--format", "json")


def git(*arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def said_by(function: object, *given: object) -> tuple[object, list[str]]:
    """What a function of ``location`` returns, and its notices."""
    said: list[str] = []
    assert callable(function)
    return function(*given, said.append), said


def filled(path: Path | str, times: dict[int, float]) -> None:
    """A database with a finished sweep of one config on each of some problems: K -> microseconds."""
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(K=K): {config(32): time_us} for K, time_us in times.items()})


def shown() -> dict[int, float]:
    """K -> the time of the pick."""
    code, out, error = fp8tune(*SHOW)
    assert code == 0, error
    return {row["size"]["K"]: row["time_us"] for row in json.loads(out)["picks"]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the commands run, where no variable names a database."""
    monkeypatch.delenv(location.VARIABLE)
    monkeypatch.setenv(location.BASE_VARIABLE, "")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "empty"


@pytest.fixture
def base(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rows that come with fp8tune: two problems, in a file elsewhere."""
    path = tmp_path / "base.db"
    filled(path, {1024: 100.0, 2048: 200.0})
    monkeypatch.setenv(location.BASE_VARIABLE, str(path))
    return path


@pytest.fixture
def checkout(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a committed ``results.db`` of one problem, and the ignored files of this one."""
    monkeypatch.setenv(location.BASE_VARIABLE, "results.db")
    filled("results.db", {1024: 100.0})
    shutil.copy(ROOT / ".gitignore", ".")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "rows")
    return Path.cwd()


def test_own_rows_are_read_over_the_base_and_alone_where_they_are_named(base: Path) -> None:
    assert shown() == {1024: 100.0, 2048: 200.0}
    filled("fp8tune.db", {1024: 90.0})
    assert shown() == {1024: 90.0, 2048: 200.0}
    code, out, error = fp8tune(*SHOW, "--db", "fp8tune.db")
    assert (code, len(json.loads(out)["picks"]), error) == (0, 1, "")


def test_the_first_line_on_stderr_says_which_rows_are_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line() -> str:
        return fp8tune(*SHOW).stderr.splitlines()[0]

    assert line() == f"rows are those that come with fp8tune, {base}"
    filled("fp8tune.db", {1024: 90.0})
    assert line() == f"rows are those of fp8tune.db over {base}; --db reads one alone"
    monkeypatch.setenv(location.VARIABLE, "none.db")
    assert line() == f"none.db, which FP8TUNE_DB names, is not there yet: rows are those that come with fp8tune, {base}"


@pytest.mark.parametrize(
    "command",
    [
        SHOW,
        ("export", "--arch", "sm_90", "--output", "table.py"),
        ("report", "--output", "report.html"),
        ("compare", "HEAD..HEAD", "--kernel", f"{ROOT}/kernels/fp8tune_kernels/quantize/colwise.py:SPEC"),
        ("doctor",),
    ],
    ids=lambda command: command[0],
)
def test_reading_makes_no_database(
    base: Path, home: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "_library", lambda: "")  # of a report: to pack it takes as long as all else
    before = base.read_bytes()
    ended = fp8tune(*command)
    assert "rows are those that come with fp8tune" in ended.stderr or command == ("doctor",)
    assert not list(home.glob("*.db*"))
    assert base.read_bytes() == before


@pytest.mark.parametrize("place", ["variable", "folder", "empty folder"])
def test_a_sweep_writes_ones_own_database_and_says_so_first(
    base: Path, home: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "mine.db" if place == "variable" else "fp8tune.db"
    if place == "variable":
        monkeypatch.setenv(location.VARIABLE, own)
    if place == "folder":
        Store.open(own, create=True).close()
    before = base.read_bytes()
    done = fp8tune(*SWEEP, *SMALL)
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == f"rows go into {own}"
    assert base.read_bytes() == before
    with Store.open(own, writable=False) as store:
        assert store.kernels() == ["rowwise-2d"]


def test_commands_that_write_leave_the_committed_database_as_it_is(checkout: Path, home: Path) -> None:
    assert fp8tune(*SWEEP, *SMALL).returncode == 0
    assert fp8tune("db", "import", str(ROOT / "sweeps" / "published" / "grouped_mm.csv")).returncode == 0
    assert fp8tune("db", "forget", "rowwise-2d", "--yes").returncode == 0
    assert git("status", "--porcelain") == ""
    assert (home / "fp8tune.db").exists()
    again = fp8tune(*SWEEP, *SMALL)
    assert again.returncode == 0
    assert shown() == {1024: 100.0}


def test_a_sweep_writes_into_what_it_is_told(checkout: Path, home: Path) -> None:
    assert fp8tune(*SWEEP, *SMALL, "--db", "results.db").returncode == 0
    assert git("status", "--porcelain").split() == ["M", "results.db"]
    assert not (home / "fp8tune.db").exists()


def test_the_base_is_written_only_if_it_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("results.db").read_bytes()
    said = "results.db has the rows that come with fp8tune: write into it with --db results.db"
    monkeypatch.setenv(location.VARIABLE, "results.db")
    assert fp8tune(*SWEEP, *SMALL) == (2, "", f"fp8tune: {said}\n")
    monkeypatch.delenv(location.VARIABLE)
    os.symlink("results.db", "fp8tune.db")
    with pytest.raises(UsageError, match=r"fp8tune\.db has the rows that come with fp8tune"):
        said_by(location.to_write, None)
    assert shown() == {1024: 100.0}
    assert Path("results.db").read_bytes() == before


def test_a_tracked_database_is_written_only_if_it_is_named(checkout: Path) -> None:
    shutil.copy("results.db", "fp8tune.db")
    git("add", "--force", "fp8tune.db")
    before = Path("fp8tune.db").read_bytes()
    said = "fp8tune: git tracks fp8tune.db: write into it with --db fp8tune.db, or into another with --db PATH\n"
    assert fp8tune(*SWEEP, *SMALL) == (2, "", said)
    assert Path("fp8tune.db").read_bytes() == before
    assert said_by(location.to_write, "fp8tune.db") == ("fp8tune.db", [])


def test_without_any_database_an_error_names_ones_own(home: Path) -> None:
    assert said_by(location.to_read, None) == (location.Databases("fp8tune.db"), [])
    assert said_by(location.to_read, "other.db") == (location.Databases("other.db"), [])
    code, out, error = fp8tune(*SHOW)
    assert (code, out) == (2, "")
    assert error.startswith("fp8tune: fp8tune.db does not exist: create it with fp8tune sweep")


def test_the_shipped_results_are_those_of_the_checkout(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(location.BASE_VARIABLE)
    filled("results.db", {1024: 100.0})
    assert location.base() == str(ROOT / "results.db")


def test_a_base_that_cannot_be_read_is_left_out_beside_own_rows(base: Path) -> None:
    base.write_bytes(b"SQLite format 3\0" + bytes(5000))
    assert fp8tune(*SHOW).returncode == 2
    filled("fp8tune.db", {1024: 90.0})
    assert "left out the results that come with fp8tune" in fp8tune(*SHOW).stderr
    assert shown() == {1024: 90.0}


def test_databases_of_users_are_ignored_in_this_repository() -> None:
    strays = ["fp8tune.db", "fp8tune.db-wal", "results.db-journal", "results.db.saved", "docs/try.db", "rows.db.xz"]
    done = subprocess.run(["git", "check-ignore", *strays, "results.db"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == strays


def test_a_variable_that_names_a_database_in_memory_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(location.VARIABLE, ":memory:")
    with pytest.raises(UsageError, match="gone when the command ends"):
        said_by(location.to_write, None)


def test_doctor_names_git_as_the_way_back_of_a_committed_database(checkout: Path) -> None:
    whole = Path("results.db").read_bytes()
    Path("results.db").write_bytes(whole[: len(whole) // 2])
    code, out, _ = fp8tune("doctor", "--db", "results.db")
    assert code == 1
    assert "mv results.db results.db.damaged; then git checkout -- results.db for the rows committed last" in out
