"""GPUs of one name that picked different configs: found with evidence, measured anew, and then the pick holds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fp8tune.check.doctor import check_database
from fp8tune.choose import ranking
from fp8tune.choose.disagreements import Disagreement, disagreements
from fp8tune.fleet import settling, units, worker
from fp8tune.records import Evidence, NamedInts, Problem
from fp8tune.store.results import Store
from fp8tune.store.units import UnitState
from fp8tune.sweep import planning, session
from fp8tune.sweep.options import Options
from fp8tune.sweep.planning import Plan

SMALL = ("LEAD=0", "num_stages=1")


def plan(folder: Path, gpu: int, *grid: str) -> Plan:
    shapes = folder / "few.toml"
    shapes.write_text("\n".join(f"[[rows]]\nM = {m}\nK = 4096\nN = 256\nE = 2\n" for m in (4096,)))
    options = Options(("colwise",), shapes=(str(shapes),), grid=(*SMALL, *grid), timer=f"simulated:1,gpu={gpu}")
    return planning.expanded(planning.planned(options))


def swept(store: Store, of: Plan) -> None:
    device = of.backend.device
    sweep = store.begin_sweep("copy", device, command="", commit="", timer="", seed=0)
    store.record_ceiling(sweep, device, 3000.0)  # as each sweep on a GPU does
    with store.adding_together(1.0):
        for _ in session.run(store, of):
            pass


def picks(store: Store, of: Plan) -> dict[Problem, NamedInts]:
    """What would be exported."""
    evidence: list[Evidence] = store.evidence(problems={each.problem for each in of.problems})
    return {one.problem: one.config or NamedInts() for one in ranking.winners(evidence)}


def found(store: Store) -> list[Disagreement]:
    return settling.disagreeing(store)


NARROW = ("BLOCK_SIZE=16", "num_warps=2", "maxnreg=0")


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that GPU 1 swept into."""
    folder = tmp_path_factory.mktemp("one")
    with Store.open(str(folder / "fleet.db"), create=True) as store:
        swept(store, plan(folder, 1))
        assert found(store) == []
    return folder / "fleet.db"


@pytest.fixture(scope="module")
def of_two(of_one: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and then GPU 2, the newest, with only a part of the configs."""
    folder = tmp_path_factory.mktemp("two")
    with Store.open(str(shutil.copy(of_one, folder))) as store:
        swept(store, plan(folder, 2, *NARROW))
    return folder / "fleet.db"


def best_of(of_one: Path, of: Plan) -> dict[Problem, NamedInts]:
    with Store.open(str(of_one), writable=False) as store:
        return picks(store, of)


def test_a_third_gpu_measures_every_pick_and_its_own_then_holds(tmp_path: Path, of_one: Path, of_two: Path) -> None:
    db = str(shutil.copy(of_two, tmp_path))
    with Store.open(db) as store:
        whole = plan(tmp_path, 1)
        best, wrong = best_of(of_one, whole), picks(store, whole)
        assert wrong != best
        apart = found(store)
        assert {each.problem for each in apart} <= set(best)
        assert all(set(each.configs) == {best[each.problem], wrong[each.problem]} for each in apart)

        third = plan(tmp_path, 3)
        added = settling.add(store, third)
        assert added is not None
        assert added.problems == len(apart) > 0
        again = settling.add(store, third)
        assert again is not None
        assert (again.new, again.sweep.key) == (0, added.sweep.key)  # nothing is queued twice
    named = [finding.what for finding in check_database(db) if "picked different configs" in finding.what]
    assert len(named) == 1

    events = list(worker.work(worker.WorkerOptions(db, "simulated:1,gpu=3", name="third")))
    assert events
    with Store.open(db) as store:
        assert store.queue().counts == {UnitState.DONE: added.new}
        assert found(store) == []
        settled = picks(store, whole)
        assert {each.problem: settled[each.problem] for each in apart} == {
            each.problem: best[each.problem] for each in apart
        }
        timed = store.evidence(problems={apart[0].problem}, device=third.backend.device)
        assert set(apart[0].configs) <= {entry.config for entry in timed if entry.finals}
        assert settling.add(store, third) is None


def test_one_of_the_two_may_do_it_where_there_is_no_third(tmp_path: Path, of_one: Path, of_two: Path) -> None:
    db = str(shutil.copy(of_two, tmp_path))
    with Store.open(db) as store:
        whole = plan(tmp_path, 1)
        best = best_of(of_one, whole)
        assert found(store)
        added = settling.add(store, whole)
        assert added is not None
    for _ in worker.work(worker.WorkerOptions(db, "simulated:1,gpu=1", name="first")):
        pass
    with Store.open(db) as store:
        assert found(store) == []
        assert picks(store, whole) == best


def test_a_tie_is_no_disagreement(tmp_path: Path, of_one: Path) -> None:
    """Two days of one kind of GPU pick now and then another config within the tie band; most of these are let be."""
    with Store.open(str(shutil.copy(of_one, tmp_path))) as store:
        other = plan(tmp_path, 2)
        swept(store, other)
        assert found(store) == []
        evidence = store.evidence()
        assert disagreements([replace(entry, device=replace(entry.device, driver="9")) for entry in evidence]) == []
        assert settling.add(store, other) is None
        assert units.queued(other).key == units.queued(plan(tmp_path, 1)).key  # whichever GPU queued it
