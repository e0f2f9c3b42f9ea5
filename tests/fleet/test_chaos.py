"""Eight workers that are killed at random, and a database server that is killed too: nothing is lost or done twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from command_line import fp8tune
from queued import DEVICE, plan_of, queue, worked
from servers import Server

from fp8tune.fleet.events import UnitDone
from fp8tune.store.results import Store
from fp8tune.store.units import UnitState

WORKERS = 8
KILLS = 16
LONGEST_S = 300.0


class Crew:
    """Worker processes, each on a made-up GPU of its own. The dead are replaced."""

    def __init__(self, db: str, log: Path, seed: int = 0) -> None:
        self._db, self._log, self._random = db, log, random.Random(seed)
        self._gpu: dict[int, int] = {}
        self.killed = 0
        for gpu in range(WORKERS):
            self._start(gpu)

    def _start(self, gpu: int) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with self._log.open("ab", buffering=0) as log:
                    for event in worked(self._db, gpu):
                        if isinstance(event, UnitDone):
                            log.write(f"{event.unit.key}\n".encode())
                code = 0
            finally:
                os._exit(code)
        self._gpu[child] = gpu

    def kill_one(self) -> None:
        """SIGKILL to one of them, and another one on the same GPU or on one more."""
        child = self._random.choice(sorted(self._gpu))
        gpu = self._gpu.pop(child)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.killed += 1
        self._start(gpu if self.killed % 2 else gpu + WORKERS)

    def ended(self) -> bool:
        """Whether all have ended, each in order."""
        for child in list(self._gpu):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del self._gpu[child]
                assert os.waitstatus_to_exitcode(status) == 0
        return not self._gpu

    def close(self) -> None:
        """End those that are left."""
        for child in self._gpu:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._gpu.clear()


def table(db: str, folder: Path, name: str) -> bytes:
    """What is exported."""
    (folder / name).mkdir()
    path = folder / name / "table.py"
    done = fp8tune("export", "--arch", "simulated", "--db", db, "--output", path)
    assert done.returncode == 0, done.stderr
    return path.read_bytes()


def check(db: str, log: Path, count: int, crew: Crew) -> None:
    """Every unit was done, and none was finished twice."""
    with Store.open(db, writable=False) as store:
        found = store.queue()
    assert found.counts == Counter({UnitState.DONE: count}), [of.reason for of in found.of(UnitState.FAILED)]
    finished = log.read_text().split()
    assert len(finished) == len(set(finished))
    assert count - crew.killed <= len(finished) <= count
    assert sum(of.attempts for of in found.units) > count  # kills did hit units


def run(db: str, folder: Path, count: int, *, quick: bool, kills: int = KILLS, server: Server | None = None) -> None:
    """Work a queue off while workers, and once the server, are killed; compare with what one worker makes of it."""
    plan = plan_of(count, quick=quick)
    with Store.open(db, create=True) as store:
        queue(store, plan)
    log, begun = folder / "done.log", time.monotonic()
    crew = Crew(db, log)
    try:
        while not crew.ended():
            time.sleep(0.25)
            assert time.monotonic() - begun < LONGEST_S
            with Store.open(db, writable=False) as store:
                done = store.count_units(DEVICE)[UnitState.DONE]
            if crew.killed < kills and done > count * crew.killed / (kills + 2):
                crew.kill_one()
            if server is not None and done > count / 3:
                server.kill()
                time.sleep(0.5)
                server.start()
                server = None
    finally:
        crew.close()
    check(db, log, count, crew)
    alone = str(folder / "alone.db")
    with Store.open(alone, create=True) as store:
        queue(store, plan)
    assert sum(isinstance(event, UnitDone) for event in worked(alone)) == count
    assert table(db, folder, "of all") == table(alone, folder, "of one")


@pytest.mark.slow
def test_workers_are_killed_beside_a_file(tmp_path: Path) -> None:
    run(str(tmp_path / "results.db"), tmp_path, 60, quick=True, kills=6)


@pytest.mark.slow
def test_workers_and_the_server_are_killed(postgresql: Server, tmp_path: Path) -> None:
    run(postgresql.database(), tmp_path, 500, quick=True, server=postgresql)
