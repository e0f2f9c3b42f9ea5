"""``--on ray``: a killed worker is started again, and a signal leaves nothing running."""

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
from command_line import environment
from fleet.crew import DEVICE, FEW, table, worked

from fp8tune.errors import DatabaseError, MachineError, UsageError
from fp8tune.fleet.on_ray import RayFleet
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")


@contextmanager
def cluster() -> Iterator[str]:
    """Start a Ray cluster of a GPU that is none, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--num-gpus=1", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats", "--block"]
    ray = Path(sys.executable).with_name("ray")
    env = {**environment(), "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        command = [ray, "start", "--head", f"--port={port}", f"--temp-dir={folder}", *options]
        log = Path(folder) / "head.log"
        for _ in range(5):  # a head that takes more than 30 s, on a busy host, ends
            with log.open("w") as output:
                head = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
            while head.poll() is None and "Ray runtime started" not in log.read_text():
                time.sleep(0.2)
            if head.poll() is None:
                break
        yield f"127.0.0.1:{port}"
        head.terminate()
        head.wait()


def marked(mark: str, words: str = "") -> list[int]:
    """Return the processes that have a mark in their environment, and words in their command line."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if mark.encode() in (folder / "environ").read_bytes() and line and words in line:
                processes.append(int(folder.name))
    return processes


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_a_signal_leaves_nothing(tmp_path: Path) -> None:
    """Workers have the mark, too, because variables of PostgreSQL are handed on."""
    (tmp_path / "sizes.toml").write_text("[[rows]]\nM = 256\nK = [512, 576]\nN = 8\nE = 2\n")
    grid = [f"--grid={axis}" for axis in FEW]
    command = [sys.executable, "-m", "fp8tune", "sweep", "--kernel", "rowwise-2d", "--shapes", "sizes.toml", *grid]
    mark, db = f"mark-{os.getpid()}", str(tmp_path / "ray.db")

    def wait_for_a_unit() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
            with suppress(DatabaseError), Store.open(db, writable=False) as store:
                if store.count_units()[UnitState.RUNNING]:
                    return
        process.kill()
        raise AssertionError(f"no worker took a unit: {process.communicate()[1]}")

    with cluster() as address:
        env = {**environment(), "RAY_AUTH_MODE": "disabled", "PGMARK": mark, "RAY_ADDRESS": address}
        env.pop("TRITON_INTERPRET", None)
        options = ["--timer", DEVICE, "--db", db, "--on", "ray"]
        process = subprocess.Popen([*command, *options], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        wait_for_a_unit()
        (worker,) = marked(mark, "fp8tune worker")
        os.kill(worker, signal.SIGKILL)
        while not set(marked(mark, "fp8tune worker")) - {worker}:
            time.sleep(0.1)
        wait_for_a_unit()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130, error
        assert "every unit that was not done waits again" in error
        assert "Traceback" not in error
        deadline = time.monotonic() + 20
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert marked(mark) == []
    alone = str(tmp_path / "alone.db")
    with Store.open(db, writable=False) as store, Store.open(alone, create=True) as second:
        queue = store.queue()
        second.add_units(queue.sweeps[0], [status.unit for status in queue.units])
    assert not queue.counts[UnitState.RUNNING]
    for path in (db, alone):
        for _ in worked(path):
            pass
    assert table(db) == table(alone)


def test_the_timer_of_the_environment_makes_gpus_of_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options_of_init = dict[str, Any]()

    def init(**options: Any) -> None:
        options_of_init.update(options)
        raise ConnectionError("enough")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for timer, name in ((None, "do_bench"), (DEVICE, ""), (None, DEVICE)):
        monkeypatch.setenv("FP8TUNE_TIMER", name)
        options_of_init.clear()
        with pytest.raises(MachineError, match="enough"):
            RayFleet(str(tmp_path / "file.db"), [], timer).__enter__()
        assert ("num_gpus" in options_of_init) == (DEVICE in (timer, name))


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
