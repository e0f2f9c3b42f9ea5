"""GPUs of one name that picked different configs: found with evidence, measured anew, and then the pick holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
    for _ in session.run(store, of):
        pass


def picks(store: Store, of: Plan) -> dict[Problem, NamedInts]:
    """What would be exported."""
    evidence: list[Evidence] = store.evidence(problems={each.problem for each in of.problems})
    return {one.problem: one.config or NamedInts() for one in ranking.winners(evidence)}


def found(store: Store) -> list[Disagreement]:
    return settling.disagreeing(store)


NARROW = ("BLOCK_SIZE=16", "num_warps=2", "maxnreg=0")


def test_a_third_gpu_measures_every_pick_and_its_own_then_holds(tmp_path: Path) -> None:
    db = str(tmp_path / "fleet.db")
    with Store.open(db, create=True) as store:
        whole, narrow = plan(tmp_path, 1), plan(tmp_path, 2, *NARROW)
        swept(store, whole)
        best = picks(store, whole)
        assert found(store) == []
        swept(store, narrow)  # the newest, with only a part of the configs
        wrong = picks(store, whole)
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


def test_one_of_the_two_may_do_it_where_there_is_no_third(tmp_path: Path) -> None:
    db = str(tmp_path / "fleet.db")
    with Store.open(db, create=True) as store:
        whole = plan(tmp_path, 1)
        swept(store, whole)
        best = picks(store, whole)
        swept(store, plan(tmp_path, 2, *NARROW))
        assert found(store)
        added = settling.add(store, whole)
        assert added is not None
    for _ in worker.work(worker.WorkerOptions(db, "simulated:1,gpu=1", name="first")):
        pass
    with Store.open(db) as store:
        assert found(store) == []
        assert picks(store, whole) == best


def test_a_tie_is_no_disagreement(tmp_path: Path) -> None:
    """Two days of one kind of GPU pick now and then another config within the tie band; most of these are let be."""
    with Store.open(str(tmp_path / "fleet.db"), create=True) as store:
        swept(store, plan(tmp_path, 1))
        other = plan(tmp_path, 2)
        swept(store, other)
        assert found(store) == []
        evidence = store.evidence()
        assert disagreements([replace(entry, device=replace(entry.device, driver="9")) for entry in evidence]) == []
        assert settling.add(store, other) is None
        assert units.queued(other).key == units.queued(plan(tmp_path, 1)).key  # whichever GPU queued it
