"""Workers and a database server that are killed at random: no unit is lost or done twice."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from fleet.crew import Crew, Do, known, plan_of, queue, table, timed_once, worked
from servers import Server

from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState


def survives(db: str, folder: Path, count: int, workers: int, kills: int, do: Do | None = None) -> None:
    plan = plan_of(count, quick=do is not None)
    queue(db, plan)
    crew = Crew(db, folder, plan, do)
    done = crew.run(workers, kills)
    with Store.open(db, writable=False) as store:
        found = store.queue()
    queue(alone := str(folder / "alone.db"), plan)
    for _ in worked(alone, 0, do, plans=known(plan, 0)):
        pass
    assert crew.killed >= 1
    assert found.counts == {UnitState.DONE: count}
    assert len(done) == len(set(done)) >= count - crew.killed
    assert sum(status.attempts for status in found.units) > count  # kills did hit units
    assert table(db) == table(alone)
    assert table(db).count("rowwise-2d") > count


@pytest.mark.slow
def test_workers_are_killed_in_the_coarse_pass_and_the_confirmation(tmp_path: Path) -> None:
    survives(str(tmp_path / "results.db"), tmp_path, 3, workers=2, kills=2)


@pytest.mark.slow
def test_workers_do_many_units_while_some_are_killed(tmp_path: Path) -> None:
    survives(str(tmp_path / "results.db"), tmp_path, 30, workers=3, kills=3, do=timed_once)


@pytest.mark.slow
def test_workers_and_the_server_are_killed(postgresql: Server, tmp_path: Path) -> None:
    def lose_the_server() -> None:
        while not (tmp_path / "done").exists() or not (tmp_path / "done").stat().st_size:
            time.sleep(0.05)
        postgresql.kill()
        time.sleep(0.5)
        postgresql.start()

    losing = threading.Thread(target=lose_the_server)
    losing.start()
    survives(postgresql.database(), tmp_path, 30, workers=3, kills=2, do=timed_once)
    losing.join()
