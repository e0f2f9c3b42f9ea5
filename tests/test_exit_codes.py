"""Exit codes and what reaches stdout: broken pipes, full disks, signals, odd paths, failing specifications."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import forked
import pytest
from command_line import environment, fp8tune
from database_rows import config, finished_sweep, problem
from forked import Forked
from places import PLANTED

from fp8tune import cli
from fp8tune.store.results import Store

HOSTILE = f"{PLANTED / 'hostile.py'}:SPEC"


def started(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fp8tune", *(os.fsencode(str(argument)) for argument in arguments)]
    return subprocess.Popen(command, env=environment(), **options)  # type: ignore[call-overload, no-any-return]


def ended(*arguments: object, **options: object) -> tuple[int, bytes, bytes]:
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


@pytest.mark.parametrize("format", ["json", "table"])
def test_a_reader_that_left_is_141_without_a_word(format: str, filled: Path) -> None:
    read, write = os.pipe()
    process = started("show", "colwise", "--db", filled, "--format", format, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    os.close(read)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (141, b"")


def test_a_full_or_closed_stdout_is_one_line(filled: Path) -> None:
    with open("/dev/full", "wb") as full:
        code, _, error = ended("show", "--db", filled, stdout=full)
    assert (code, error.count(b"\n"), b"No space left on device" in error) == (2, 1, True)
    code, _, error = ended("show", "--db", filled, preexec_fn=lambda: os.close(1))
    assert (code, error.count(b"\n"), b"stdout is closed" in error) == (2, 1, True)
    code, out, _ = ended("show", "--db", filled, "--format", "json", preexec_fn=lambda: os.close(2))
    assert code == 0
    json.loads(out)


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "stopped; "),
        (signal.SIGTERM, 143, "stopped by SIGTERM; "),
        (signal.SIGHUP, 129, "stopped by SIGHUP; "),
    ],
)
def test_a_signal_is_one_line_and_its_code(number: int, code: int, message: str, tmp_path: Path) -> None:
    sweep = ("sweep", "--kernel", "colwise", "--shapes", "tiny", "--timer", "simulated:1", "--db", tmp_path / "r.db")

    def run() -> None:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)  # nohup
        with mock.patch("sys.argv", ["fp8tune", *map(str, sweep), "--format", "json"]):
            cli.main()

    running = Forked(run)
    while b'"config"' not in running.line().encode():
        pass
    os.kill(running.pid, number)
    result, output = running.wait()
    assert result == code, output
    last = output.splitlines()[-1]
    assert last.startswith(f"fp8tune: {message}")
    assert f"in {tmp_path / 'r.db'}" in last
    assert "run the same command to resume" in last


def test_a_size_without_a_right_config_is_1_and_a_specification_prints_nothing(tmp_path: Path) -> None:
    db, shapes = tmp_path / "r.db", tmp_path / "one.toml"
    shapes.write_text("[[rows]]\nM = 40\nK = 24\nN = 8\nE = 2\n")
    sweep = ("sweep", "--kernel", HOSTILE, "--shapes", shapes, "--db", db)
    code, out, error = forked.ended(*sweep, "--format", "json")
    lines = [json.loads(line) for line in out.splitlines()]
    if any(line.get("kind") == "measured" for line in lines):
        pytest.skip("there is a GPU here")
    assert code == 1, error
    assert "hostile: launch" in error
    assert "\x1b" not in error + out
    assert fp8tune(*sweep).returncode == 1  # from the database
    shown = fp8tune("show", HOSTILE, "--failed", "--db", db)
    assert (shown.returncode, "wrong" in shown.stdout) == (0, True)
