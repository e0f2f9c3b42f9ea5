"""Workers that are killed at random, and a database server that is killed too: no unit is lost or done twice.

Five hundred units, and nodes that are killed too: ``test_on_ray.py``.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import Server

from benchmarks.fleet import Survived, chaos, plan_of, throughput, timed_once
from fp8tune.store.schema import UnitState

WORKER_S = 199.0
"""The time budget of a worker. Below 220 s it checks no config before its first unit: half a second each."""


def check(found: Survived, count: int) -> None:
    assert found.states == Counter({UnitState.DONE: count})
    assert len(found.finished) == len(set(found.finished))
    assert count - found.killed <= len(found.finished) <= count
    assert found.attempts > count  # kills did hit units
    assert found.table == found.table_of_one
    assert found.table.count("rowwise-2d") > count


@pytest.mark.slow
def test_workers_are_killed_in_screens_and_finals(tmp_path: Path) -> None:
    given = {"workers": 3, "kills": 3, "time_budget_s": WORKER_S}
    check(chaos(str(tmp_path / "results.db"), tmp_path, plan_of(6, quick=False), **given), 6)  # type: ignore[arg-type]


@pytest.mark.slow
def test_workers_and_the_server_are_killed(postgresql: Server, tmp_path: Path) -> None:
    def lose_the_server() -> None:
        postgresql.kill()
        time.sleep(0.5)
        postgresql.start()

    given = {"do": timed_once, "in_the_middle": lose_the_server, "workers": 6, "kills": 6, "time_budget_s": WORKER_S}
    check(chaos(postgresql.database(), tmp_path, plan_of(60), **given), 60)  # type: ignore[arg-type]


@pytest.mark.slow
def test_eight_workers_do_eight_times_as_much(tmp_path: Path) -> None:
    """On a machine that others use, too, the best of five."""
    for number in range(5):

        def rate(workers: int, folder: Path = tmp_path / f"{number}") -> float:
            folder.mkdir(exist_ok=True)
            of = str(folder / f"{workers}.db")
            return throughput(of, workers, units_each=2, unit_s=0.8, time_budget_s=WORKER_S)

        with ThreadPoolExecutor() as beside:  # what else goes on slows both, and they mostly sleep
            one, eight = beside.map(rate, (1, 8))
        if eight > 0.9 * 8 * one:
            return
    raise AssertionError(f"{one:.3f} units a second alone, {eight:.3f} of eight workers")
