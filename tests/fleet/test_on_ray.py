"""``--on ray``: every unit once whatever dies, the table of one worker, and nothing left running."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from command_line import environment, fp8tune
from fleet import ray_cluster
from forked import alone
from servers import PASSWORD, Server

from fp8tune.errors import MachineError, UsageError
from fp8tune.fleet import events, on_ray, ray_actor, worker
from fp8tune.fleet.on_ray import RayFleet
from fp8tune.fleet.ray_actor import RayWorker, Task, check_device
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import Unit
from fp8tune.sweep import session

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")  # not imported: all workers read this


SECRETS = (PASSWORD, quote(PASSWORD, safe=""))


@pytest.mark.slow
@alone
def test_workers_a_node_and_the_database_die_and_the_table_is_that_of_one_worker(
    postgresql: Server, tmp_path: Path
) -> None:
    with ray_cluster.cluster(6, 2) as cluster:
        survives(cluster, postgresql, tmp_path)


def survives(cluster: Any, postgresql: Server, tmp_path: Path) -> None:
    plan = ray_cluster.plan(tmp_path, 500)
    db = postgresql.database()

    def restart(_: RayFleet) -> None:
        postgresql.kill()
        postgresql.start()

    acts = [
        (0.0, each_has_its_own_gpu_and_cores),
        (0.05, ray_cluster.kill_a_worker(1)),
        (0.25, restart),
        (0.4, ray_cluster.kill_node(cluster, 1)),
        (0.45, ray_cluster.add_node(cluster, 2)),
        (0.7, ray_cluster.kill_a_worker(2)),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        progress = ray_cluster.on_ray(db, plan, acts)
    assert printed.getvalue() == ""  # whatever Ray says of lost actors
    assert progress.counts == {UnitState.DONE: len(plan.problems)}

    alone = str(tmp_path / "alone.db")
    with Store.open(alone, create=True) as store, store.adding_together(1.0):
        for _ in session.run(store, plan):
            pass
    for path in (alone, db):
        with Store.open(path, writable=False) as store:
            done = [row for row in store.rows() if row.stage == "screen"]
            places = {(row.problem, row.config, row.device.uuid_hash, row.round) for row in done}
            assert len(places) == len(done)  # no row twice
    tables = [exported(path, tmp_path / f"{name}.py") for name, path in (("one", alone), ("eight", db))]
    assert tables[0] == tables[1]
    assert not [pid for pid, line in processes() if any(secret in line for secret in SECRETS)]
    logs = [path for path in Path(cluster.head_node.get_session_dir_path()).rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs if any(secret in path.read_text(errors="replace") for secret in SECRETS)]


def exported(db: str, path: Path) -> bytes:
    with mock.patch.dict(os.environ, FP8TUNE_DB=db):
        ended = fp8tune("export", "--arch", "simulated", "--kernel", ray_cluster.KERNEL, "--output", path)
    assert ended.returncode == 0, ended.stderr
    return path.read_bytes()


def processes() -> list[tuple[int, str]]:
    """Every process with its command line and environment, where these can be read."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except (OSError, UnicodeDecodeError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT])
def test_a_signal_leaves_nothing_running_and_every_unit_waits(tmp_path: Path, number: int) -> None:
    db, mark = tmp_path / "own.db", f"mark-{os.getpid()}-{number}"
    shapes = ray_cluster.shapes(tmp_path, 60)
    command = [sys.executable, "-m", "fp8tune", "sweep", "--on", "ray", "--kernel", ray_cluster.KERNEL]
    command += ["--shapes", str(shapes), "--timer", "simulated:1", "--db", str(db)]
    command += ["--time-budget", "100"]  # too short for a calibration, for which each worker would import torch
    env = {**environment(), **ray_cluster.RAY, "FP8TUNE_MARK": mark}
    for name in ("RAY_ADDRESS", *on_ray.OF_A_CLUSTER_BEGUN_HERE):
        env.pop(name, None)
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not running_units(db) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert running_units(db)
        assert len(marked(mark)) > 3  # Ray, its actors and this
        actors = [pid for pid, line in marked(mark).items() if "RayWorker" in line]
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in actors} == {os.getpriority(os.PRIO_PROCESS, 0)}
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, error
    assert "every unit that was not done waits again" in error
    assert "Traceback" not in error
    deadline = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == {}
    with Store.open(str(db), writable=False) as store:
        queue = store.queue()
        assert not queue.of(UnitState.RUNNING)
        assert all(of.attempts == 0 for of in queue.of(UnitState.WAITING))


def running_units(db: Path) -> int:
    if not db.exists():
        return 0
    try:
        with Store.open(str(db), writable=False) as store:
            return len(store.queue().of(UnitState.RUNNING))
    except Exception:
        return 0


def marked(mark: str) -> dict[int, str]:
    """Process -> its command line, of those that have a mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
        except OSError:
            continue
    return {pid: line for pid, line in found.items() if line}


def each_has_its_own_gpu_and_cores(fleet: RayFleet) -> None:
    import ray

    seen = ray.get([slot.actor.where.remote() for slot in fleet.slots])
    assert len({pid for pid, _, _ in seen}) == len(seen) == 8
    by_node: dict[str, list[str]] = {}
    for slot, (_, gpu, _) in zip(fleet.slots, seen, strict=True):
        by_node.setdefault(slot.node, []).append(gpu)
    assert sorted(sorted(gpus) for gpus in by_node.values()) == [list("01"), list("012345")]
    assert {slot.cpus for slot in fleet.slots} == {0.16, 0.5}


# Without a cluster


class FakeRay:
    """A cluster as Ray tells of it."""

    def __init__(self, *nodes: tuple[str, str, float, float]) -> None:
        self._nodes = [
            {
                "NodeID": id, "NodeManagerAddress": address, "NodeManagerHostname": id, "Alive": True,
                "Resources": {"GPU": gpus, "CPU": cpus},
            }
            for id, address, gpus, cpus in nodes
        ]  # fmt: skip
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
        self.has_ended = False

    def init(self, **_: object) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def shutdown(self) -> None:
        self.has_ended = True


def test_a_file_is_refused_where_gpus_are_on_other_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = FakeRay(("a", "10.0.0.1", 8, 64), ("b", "10.0.0.2", 8, 64))
    monkeypatch.setattr(on_ray, "imported", lambda: ray)
    with pytest.raises(
        UsageError, match=r"is a file of this host, and GPUs are on 1 other \(10.0.0.2\): give a server"
    ):
        begun(tmp_path)
    assert ray.has_ended


def begun(folder: Path) -> None:
    """A fleet that begins and ends."""
    db = str(folder / "file.db")
    with Store.open(db, create=True) as store, RayFleet(db, store):
        pass


def test_a_task_tells_nobody_its_url_or_password() -> None:
    task = Task("postgresql://me:secret@host/db", "w", 0, 1, environment={"PGPASSWORD": "secret"})
    assert "secret" not in repr(task)


def test_torch_before_the_gpu_is_refused_and_amd_s_two_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="torch was imported before"):
        check_device(True, {})
    with pytest.raises(MachineError, match="start Ray without it"):
        check_device(False, {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "2,3"})
    check_device(False, {"ROCR_VISIBLE_DEVICES": "2,3"})
    with pytest.raises(MachineError):
        RayWorker(Task("", "w", 0, 1))  # the tests have imported torch


def test_who_is_told_to_stop_says_whether_it_has_a_unit_and_takes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took units until it was killed, ten seconds after Ctrl-C."""
    of = Unit("unit", "sweep", 0, "colwise", "aaaa", ("problem",), ("M=1",))
    seen, has_unit = [], []

    def work(*_: object, **__: object) -> Iterator[events.WorkerEvent]:
        for number in range(3):
            seen.append(number)
            yield events.UnitTaken(of, 1)
            has_unit.append(actor.stop())
            yield events.UnitDone(of, 1.0, 1)

    monkeypatch.setattr(ray_actor, "check_device", lambda *_: None)
    monkeypatch.setattr(worker, "work", work)
    actor = RayWorker(task := Task("", "w", 0, 1))
    assert actor._work(task) == ""
    assert (seen, has_unit, actor.stop()) == ([0], [True], False)


def test_importing_the_actor_imports_no_torch() -> None:
    code = "import sys, fp8tune.fleet.ray_actor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fresh_processes_of_an_actor_do_not_run_rays_own_program(tmp_path: Path) -> None:
    program = tmp_path / "main.py"
    program.write_text(
        "import sys\n"
        "if __name__ != '__main__': print('run again')\n"
        "from fp8tune.fleet.ray_actor import forget_main\n"
        "from fp8tune.measure.worker import PRELOAD, Worker\n"
        "PRELOAD.clear()  # seconds, and nothing is launched here\n"
        "if __name__ == '__main__':\n"
        "    if sys.argv[1:]: forget_main()\n"
        "    Worker().call(60, print, 'called')\n"
    )
    said = []
    for more in ([], ["forget"]):
        command = [sys.executable, str(program), *more]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
        said.append(ended.stdout)
    assert ["run again" in text for text in said] == [True, False]
    assert all("called" in text for text in said)
