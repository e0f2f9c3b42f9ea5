"""Workers and a database server that are killed at random: no unit is lost or done twice."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from fleet.crew import Crew, known, plan_of, queue, table, timed_once, worked
from servers import Server

from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState


@pytest.mark.slow
def test_workers_and_the_server_are_killed(postgresql: Server, tmp_path: Path) -> None:
    def lose_the_server() -> None:
        while not (tmp_path / "done").exists() or not (tmp_path / "done").stat().st_size:
            time.sleep(0.05)
        postgresql.kill()
        time.sleep(0.5)
        postgresql.start()

    count, db, plan = 24, postgresql.database(), plan_of(24)
    queue(db, plan)
    losing = threading.Thread(target=lose_the_server)
    losing.start()
    crew = Crew(db, tmp_path, plan, timed_once)
    done = crew.run(workers=3, kills=2)
    losing.join()
    with Store.open(db, writable=False) as store:
        units = store.queue()
    queue(alone := str(tmp_path / "alone.db"), plan)
    for _ in worked(alone, 0, timed_once, plans=known(plan, 0)):
        pass
    assert crew.killed >= 1
    assert units.counts == {UnitState.DONE: count}
    assert len(done) == len(set(done)) >= count - crew.killed
    assert sum(status.attempts for status in units.units) > count  # kills did hit units
    assert table(db) == table(alone)
    assert table(db).count("rowwise-2d") > count
