"""``--on ray``: the table of one worker although workers are killed, and nothing left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import environment, fp8tune
from fleet.crew import FEW, table

from fp8tune.errors import DatabaseError, UsageError
from fp8tune.fleet.on_ray import RayFleet
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")


def command(folder: Path, db: str) -> list[str]:
    (folder / "many.toml").write_text("[[rows]]\nM = 256\nK = [512, 576, 640, 704]\nN = 8\nE = 2\n")
    grid = [f"--grid={axis}" for axis in FEW]
    return ["sweep", "--kernel", "rowwise-2d", "--shapes", "many.toml", *grid, "--timer", "simulated:1", "--db", db]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of two GPUs that are none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--num-gpus=2", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", "--block"]
    ray = Path(sys.executable).with_name("ray")
    env = {**environment(), "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        command = [ray, "start", "--head", f"--port={port}", f"--temp-dir={folder}", *options]
        head = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        raylet = Path(folder) / "session_latest" / "sockets" / "raylet"
        while head.poll() is None and not raylet.exists():  # on a busy host later than clients wait
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
        head.terminate()
        head.wait()


@contextmanager
def on_ray(folder: Path, mark: str, address: str) -> Iterator[subprocess.Popen[str]]:
    """Run a sweep; its workers have the mark, too, because variables of PostgreSQL are handed on."""
    env = {**environment(), "RAY_AUTH_MODE": "disabled", "PGMARK": mark, "RAY_ADDRESS": address}
    env.pop("TRITON_INTERPRET", None)
    started = [sys.executable, "-m", "fp8tune", *command(folder, "ray.db"), "--on", "ray"]
    process = subprocess.Popen(started, env=env, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()


def marked(mark: str, words: str = "") -> list[int]:
    """Return the processes that have a mark in their environment, and words in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if mark.encode() in (folder / "environ").read_bytes() and line and words in line:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_for_a_unit(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
        with suppress(DatabaseError), Store.open(str(folder / "ray.db"), writable=False) as store:
            if store.count_units()[UnitState.RUNNING]:
                return
    raise AssertionError("no worker took a unit")


@pytest.mark.slow
def test_a_worker_is_killed_and_the_table_is_that_of_one(tmp_path: Path, address: str) -> None:
    mark = f"mark-{os.getpid()}-killed"
    with on_ray(tmp_path, mark, address) as process:
        wait_for_a_unit(tmp_path, process)
        os.kill(marked(mark, "fp8tune worker")[0], signal.SIGKILL)
        _, error = process.communicate(timeout=200)
        assert process.returncode == 0, error
    alone = fp8tune(*command(tmp_path, "alone.db"), cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert table(str(tmp_path / "ray.db")) == table(str(tmp_path / "alone.db"))


@pytest.mark.slow
def test_a_signal_leaves_nothing_running_and_every_unit_waits(tmp_path: Path, address: str) -> None:
    mark = f"mark-{os.getpid()}-told"
    with on_ray(tmp_path, mark, address) as process:
        wait_for_a_unit(tmp_path, process)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "every unit that was not done waits again" in error
    assert "Traceback" not in error
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert marked(mark) == []
    with Store.open(str(tmp_path / "ray.db"), writable=False) as store:
        queue = store.queue()
    assert not queue.of(UnitState.RUNNING)
    assert all(status.attempts == 0 for status in queue.of(UnitState.WAITING))


def test_a_file_is_refused_where_gpus_are_on_other_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes: list[dict[str, Any]] = [
        {"NodeManagerAddress": address, "Alive": True, "Resources": {"GPU": 8.0}}
        for address in ("10.0.0.1", "10.0.0.2")
    ]
    util, ended = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"), list[bool]()
    calls = {"init": lambda **_: None, "nodes": lambda: nodes, "shutdown": lambda: ended.append(True)}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**calls, util=util))
    with pytest.raises(UsageError, match=r"is a file of this host, and GPUs are on 1 others, such as 10.0.0.2"):
        RayFleet(str(tmp_path / "file.db"), []).__enter__()
    assert ended
