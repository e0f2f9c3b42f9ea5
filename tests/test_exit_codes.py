"""How the program ends, and what reaches stdout: exit codes, broken pipes, full disks, odd options, failing specs."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from command_line import environment, fp8tune
from database_rows import config, finished_sweep, problem
from forked import Forked
from places import PLANTED, ROOT

from fp8tune import cli
from fp8tune.store.results import Store

HOSTILE = f"{PLANTED / 'hostile.py'}:SPEC"


def started(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fp8tune", *(os.fsencode(str(argument)) for argument in arguments)]
    return subprocess.Popen(command, env=environment(), **options)  # type: ignore[call-overload, no-any-return]


def started_and_ended(*arguments: object, **options: object) -> tuple[int, bytes, bytes]:
    process = started(*arguments, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})
    out, error = process.communicate(timeout=120)
    return process.returncode, out or b"", error or b""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than a pipe holds as JSON."""
    path = tmp_path_factory.mktemp("filled") / "results.db"
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(K=k): {config(): 100.0} for k in range(1, 150)})
    return path


def test_the_module_is_the_program() -> None:
    code, out, _ = started_and_ended("show", "--help")
    assert code == 0
    assert out.startswith(b"Usage: fp8tune show ")


@pytest.mark.parametrize("format", ["json", "table"])
def test_a_reader_that_leaves_is_no_finding(format: str, filled: Path) -> None:
    """``| head -1``, of more than the pipe holds and of less."""
    read, write = os.pipe()
    process = started("show", "--db", filled, "--format", format, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    os.close(read)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (141, b"")


def test_a_full_or_closed_stdout_is_one_line(filled: Path) -> None:
    with open("/dev/full", "wb") as full:
        code, _, error = started_and_ended("show", "--db", filled, stdout=full)
    assert (code, error.splitlines()) == (
        2,
        [b"fp8tune: stdout cannot be written: No space left on device; redirect it elsewhere"],
    )
    code, _, error = started_and_ended("show", "--db", filled, preexec_fn=lambda: os.close(1))
    assert (code, len(error.splitlines())) == (2, 1)
    assert b"stdout is closed" in error
    code, out, _ = started_and_ended("show", "--db", filled, "--format", "json", preexec_fn=lambda: os.close(2))
    assert code == 0
    json.loads(out)


def test_ctrl_c_is_130_and_a_line(tmp_path: Path) -> None:
    sweep = ("sweep", "--kernel", "colwise", "--shapes", "tiny", "--timer", "simulated:1", "--db", tmp_path / "r.db")

    def run() -> None:
        with mock.patch("sys.argv", ["fp8tune", *map(str, sweep), "--json"]):
            cli.main()

    running = Forked(run)
    running.read(1)
    os.kill(running.pid, signal.SIGINT)
    code, output = running.wait()
    assert code == 130
    assert output.splitlines()[-1].startswith("fp8tune: stopped; ")


LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", "--arch", "sm_90", "--output", "."], "is a folder"),
        (["export", "--arch", "sm_90", "--output", f"{LONG}.py"], "File name too long"),
        (["show", "--db", LONG], "File name too long"),
        (["show", "--db", "\udcff.db"], "\\udcff.db does not exist"),
        (["import", f"{LONG}.csv"], "File name too long"),
        (["import", "\udcff.csv"], "\\udcff.csv"),
        (["sweep", "--shapes", f"{LONG}.toml"], "File name too long"),
        (["sweep", "--shapes", "\udcff.toml"], "\\udcff.toml"),
        (["sweep", "--kernel", f"{LONG}.py:SPEC"], "File name too long"),
        (["sweep", "--kernel", "\udcff.py:SPEC"], "\\udcff.py"),
        (["sweep", "--kernel", "__main__:SPEC"], "__main__"),
        (["compare", "HEAD..HEAD", "--repo", LONG, "--from-db"], "File name too long"),
        (["compare", "^HEAD..HEAD", "--repo", str(ROOT), "--from-db"], "unknown revision '^HEAD'"),
        (["sweep", "--db", ""], "in memory"),
        (["sweep", "--db", ":memory:"], "in memory"),
        (["calibrate", "--db", "sqlite://"], "in memory"),
        (["lint", "colwise", "--db", ""], "in memory"),
        *((["sweep", "--time-budget", text], f"'--time-budget': '{text}'") for text in ("nan", "inf", "-1", "x")),
        (["bench", "--time-budget", "nan"], "'--time-budget': 'nan'"),
        (["lint", "colwise", "--time-budget", "-inf"], "'--time-budget': '-inf'"),
        (["sweep", "--trial-timeout", "nan"], "'--trial-timeout': 'nan'"),
        (["sweep", "--trial-timeout", "0.5"], "at least 1 second"),
        (["sweep", "--seed", str(2**64)], "'--seed'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(
    arguments: list[str], says: str, filled: Path, tmp_path: Path
) -> None:
    if "--db" not in arguments and arguments[0] in ("show", "export", "compare"):
        arguments = [*arguments, "--db", str(filled)]
    code, out, error = fp8tune(*arguments, cwd=tmp_path)
    said = [line for line in error.splitlines() if line.startswith("fp8tune: ")]
    assert (code, out, len(said)) == (2, "", 1), error
    assert says in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_without_a_right_config_is_a_finding_and_prints_nothing_of_the_kernel(tmp_path: Path) -> None:
    db, shapes = tmp_path / "r.db", tmp_path / "one.toml"
    shapes.write_text("[[rows]]\nM = 40\nK = 24\nN = 8\nE = 2\n")
    sweep = ("sweep", "--kernel", HOSTILE, "--shapes", shapes, "--db", db)
    # a process of its own: forked from this one its workers crashed once, where three test processes shared two cores
    code, *said_by_it = started_and_ended(*sweep, "--json")
    out, error = (each.decode() for each in said_by_it)
    rows = [json.loads(line) for line in out.splitlines()]
    if rows[0]["kind"] == "measured":
        pytest.skip("there is a GPU here")
    assert code == 1, error
    assert {(row["config"]["FAULT"], row["status"]) for row in rows} == {(0, "wrong"), (1, "compile_error")}, rows
    assert {row["reason"] for row in rows if row["config"]["FAULT"]} == {
        "ValueError: \\x1b[2J\\udcff\\x00[/red] planted"
    }
    for said in ("imported", "problems", "problems, past Python", "launch", "launch, past Python"):
        assert f"hostile: {said}" in error
    assert "\x1b" not in error + out

    code, _, error = fp8tune(*sweep)  # answered from the database
    assert code == 1
    assert "planted-hostile: no config is right on 1 of 1 problems" in error
    assert f"fp8tune show --failed --kernel planted-hostile --arch interpreter --db {db}" in error
    code, out, _ = fp8tune("show", "--arch", "interpreter", "--kernel", HOSTILE, "--db", db)
    assert code == 0
    assert "planted-hostile  interpreter  interpreter" in out
    told = json.loads(fp8tune("show", "--failed", "--format", "json", "--db", db).stdout)
    assert [(one["configs"], one["ok"], one["wrong"], one["other"], one["status"]) for one in told] == [
        (2, 0, 1, 1, "wrong")
    ]


def test_a_text_that_a_spreadsheet_would_calculate_is_quoted_and_read_back(tmp_path: Path) -> None:
    source, db, again = tmp_path / "figures.csv", tmp_path / "r.db", tmp_path / "again.db"
    header = (
        "operation,source,device,arch,recipe,shape,bf16_fwd_us,scaled_fwd_us,bf16_fwd_bwd_us,scaled_fwd_bwd_us,note"
    )
    notes = ["=1+1", "'=1", "@x", "-2", "+3", "plain", "it's"]
    lines = [f"grouped-mm,=HYPERLINK(1),GPU,sm_90,fp8,M=1{i},2,1,4,3,{note}" for i, note in enumerate(notes)]
    source.write_text("\n".join([header, *lines]) + "\n")
    with Store.open(str(db), create=True):
        pass
    assert fp8tune("import", source, "--db", db).returncode == 0
    _, out, _ = fp8tune("show", "--op", "grouped-mm", "--format", "csv", "--db", db)
    assert not [cell for line in out.splitlines() for cell in line.split(",") if cell[:1] in ("=", "+", "-", "@")]
    source.write_text(out)
    assert fp8tune("import", source, "--db", again).returncode == 0
    kept = "select note, source from published_operations order by id"
    assert sqlite3.connect(again).execute(kept).fetchall() == sqlite3.connect(db).execute(kept).fetchall()
