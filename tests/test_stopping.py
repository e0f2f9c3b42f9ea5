"""SIGTERM and SIGHUP end every command cleanly: a line, a code, one plain file, no process left, all rows kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked, told_to_end
from places import PLANTED

from fp8tune.stopping import Stopped, stopping_cleanly
from fp8tune.store.results import Store

FAULTS, UNTOUCHED = (f"{PLANTED / name}:SPEC" for name in ("faults.py", "untouched.py"))
SWEEP = ("sweep", "--kernel", FAULTS, "--shapes", "tiny", "--timer", "simulated:5", "--grid", "num_warps=1,2,4,8,16,32")


@pytest.fixture(autouse=True)
def hangups_are_not_ignored() -> Iterator[None]:
    """Under ``nohup`` this process ignores SIGHUP, and so would every command that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_stack_once(number: int) -> None:
    undone, before = [], signal.getsignal(number)  # which another test may have set: Ray sets one

    @stopping_cleanly()
    def command() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # who asks twice does not break off what the first began
            undone.append(True)

    with pytest.raises(Stopped) as raised:
        command()
    assert (raised.value.code, undone) == (128 + number, [True])
    assert signal.getsignal(number) is before


def test_what_fails_while_it_ends_does_not_hide_why_it_ends() -> None:
    @stopping_cleanly()
    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            raise OSError("the terminal is gone")

    with pytest.raises(Stopped):
        command()


def test_nohup_is_heeded() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_cleanly():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_are_left_alone() -> None:
    failed: list[BaseException] = []

    def inside() -> None:
        try:
            with stopping_cleanly():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert not failed


def test_a_command_that_is_told_to_end_leaves_one_plain_file_and_no_process(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    running = Forked(told_to_end(signal.SIGTERM, *SWEEP, "--db", str(path)))
    code, output = running.wait()  # ends only where nothing that it began still has the pipe
    assert code == 143, output
    assert output.splitlines()[-1].startswith("fp8tune: stopped by SIGTERM; ")
    assert "Traceback" not in output
    assert [file.name for file in tmp_path.iterdir()] == ["results.db"]
    assert path.read_bytes()[18] == 1  # not WAL


@pytest.mark.slow
def test_a_sweep_whose_whole_group_of_processes_is_told_keeps_its_rows_and_condemns_no_config(tmp_path: Path) -> None:
    """Signal the process group, as ``timeout``, Slurm and a closed terminal do."""
    path, log = tmp_path / "results.db", tmp_path / "log"
    sweep = ("sweep", "--kernel", UNTOUCHED, "--shapes", "models", *SWEEP[-4:])  # of many seconds, and without torch
    command = [sys.executable, "-m", "fp8tune", *sweep, "--db", str(path), "--format", "json"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, process_group=0)
    while log.read_text().count("\n") < 2:  # the first line announces the sweep
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    _, progress = process.communicate(timeout=300)  # workers have the pipe too
    assert process.returncode == 143, progress
    assert not Path(f"{path}-wal").exists()
    with Store.open(str(path), writable=False) as store:
        stored = list(store.rows())
    assert len(stored) >= len(log.read_text().splitlines()) - 1
    assert {row.outcome.status for row in stored} == {"ok"}
