"""``--on ray``: a killed task is repeated, a signal leaves nothing running, and the results are those of one GPU."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import environment, fp8tune
from places import PLANTED

from fp8tune.errors import MachineError, UsageError
from fp8tune.options import SweepOptions
from fp8tune.store.results import Store
from fp8tune.sweeping import on_ray, planning
from fp8tune.sweeping.planning import Plan

UNTOUCHED = f"{PLANTED / 'untouched.py'}:SPEC"
SWEEP = ("sweep", "--kernel", UNTOUCHED, "--shapes", "tiny", "--grid", "num_warps=4", "--timer", "simulated:1")


def marked(mark: str, words: str = "") -> list[int]:
    """Return the processes that have a mark in their environment, and words in their command line."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if mark.encode() in (folder / "environ").read_bytes() and line and words in line:
                processes.append(int(folder.name))
    return processes


def picked(db: Path) -> dict[str, tuple[object, ...]]:
    with Store.open(str(db), writable=False) as store:
        return {str(p.problem): (p.config, p.verdict, p.time_us) for p in store.kept_picks()}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_a_killed_task_is_repeated_and_a_signal_leaves_nothing(tmp_path: Path) -> None:
    mark, db, alone = f"mark-{os.getpid()}", tmp_path / "ray.db", tmp_path / "alone.db"
    env = {**environment(), "PGMARK": mark}
    command = [sys.executable, "-m", "fp8tune", *SWEEP, "--db", str(db), "--on", "ray"]

    def wait_for(what: Any) -> None:
        deadline = time.monotonic() + 240
        while not what() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)

    def rows() -> int:
        with contextlib.suppress(Exception), Store.open(str(db), writable=False) as store:
            return sum(1 for _ in store.rows())
        return 0

    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: marked(mark, on_ray.RUN))
    for task in marked(mark, on_ray.RUN):
        os.kill(task, signal.SIGKILL)
    wait_for(rows)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "run the same command to resume" in error
    deadline = time.monotonic() + 30
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert marked(mark) == []
    stored = rows()
    assert stored > 0
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 sizes" in done.stdout
    assert fp8tune(*SWEEP, "--db", alone).returncode == 0
    assert picked(db) == picked(alone) != {}


def plan_of(**options: Any) -> Plan:
    options = {"kernel": (UNTOUCHED,), "shapes": ("tiny",), "timer": "simulated:1", "on": "ray", **options}
    return planning.expanded(planning.planned(SweepOptions(**options)))


class StandIn:
    """Cluster in this process, which runs a task when its result is requested."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, gpus: int = 2) -> None:
        self.gpus, self.ended = gpus, False
        self.tasks = list[Any]()

    def init(self, **_: object) -> None:
        pass

    def shutdown(self) -> None:
        self.ended = True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"GPU": float(self.gpus)}}]

    def remote(self, **_: object) -> Any:
        return lambda function: SimpleNamespace(remote=lambda *arguments: partial(function, *arguments))

    def wait(self, tasks: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        return tasks[:1], tasks[1:]

    def get(self, task: Any) -> Any:
        self.tasks.append(task)
        return task()

    def cancel(self, *_: object, **__: object) -> None:
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


def test_tasks_return_databases_and_the_driver_alone_writes(
    cluster: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(work: bytes, environment: dict[str, str], folder: str) -> tuple[bytes, object]:
        (tmp_path / "work").write_bytes(work)
        monkeypatch.setenv("FP8TUNE_TIMER", environment["FP8TUNE_TIMER"].replace("simulated:1", "simulated:1,gpu=3"))
        monkeypatch.setattr(sys, "argv", ["-c", str(results := tmp_path / f"part{len(cluster.tasks)}")])
        results.mkdir()
        with (tmp_path / "work").open("rb") as file:
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=file))
            on_ray.main()
        return (results / "part.db").read_bytes(), pickle.loads((results / "finished").read_bytes())

    monkeypatch.setattr(on_ray, "run_task", task)
    db, alone = tmp_path / "ray.db", tmp_path / "alone.db"
    done = fp8tune(*SWEEP, "--on", "ray", "--db", db)
    assert done.returncode == 0, done.stderr
    assert (len(cluster.tasks), cluster.ended) == (2, True)
    assert fp8tune(*SWEEP, "--db", alone).returncode == 0
    assert picked(db) == picked(alone) != {}
    assert fp8tune(*SWEEP, "--on", "ray", "--db", db).returncode == 0
    assert len(cluster.tasks) == 2  # all sizes are decided


def test_a_task_that_fails_is_named_and_its_size_is_left(
    cluster: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def task(*_: object) -> None:
        raise RuntimeError("the node was lost")

    monkeypatch.setattr(on_ray, "run_task", task)
    done = fp8tune(*SWEEP, "--on", "ray", "--db", tmp_path / "ray.db")
    assert done.stderr.count("RuntimeError") == 2
    assert "blocks: run the same command to resume" in done.stderr


def test_what_ray_cannot_do_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    with Store.open(str(tmp_path / "ray.db"), create=True) as store:
        for stand_in, error, words in (
            (None, UsageError, "--on ray needs Ray"),
            (StandIn(0), MachineError, "no GPU is in the Ray cluster"),
        ):
            monkeypatch.setitem(sys.modules, "ray", stand_in)
            with pytest.raises(error, match=words):
                list(on_ray.run(store, plan, begun=time.monotonic()))


def test_a_node_with_another_gpu_sweeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"backend": "NVIDIA H200", "options": SweepOptions()}
    (tmp_path / "work").write_bytes(pickle.dumps((own, 0.0, 0.0)))
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path)])
    with (tmp_path / "work").open("rb") as file:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=file))
        with pytest.raises(SystemExit) as raised:
            on_ray.main()
    assert raised.value.code == 2
