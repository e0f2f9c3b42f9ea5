"""One record a candidate: what is left out before a record is made must make no difference to who wins."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from database_rows import H100, H200, KERNEL, begin, config, end_finals, finished_sweep, problem, row, subject
from places import ROOT

from fp8tune.choose import ranking
from fp8tune.choose.decision import PickVerdict
from fp8tune.export import table as export
from fp8tune.records import ComparableRows, Kind, Status
from fp8tune.store.importing import import_file
from fp8tune.store.results import Store

NEWER_DRIVER = replace(H100, driver="590.1")
NEWER_KERNEL = replace(KERNEL, source_hash="bbbb")


SEEDS = [("sqlite", seed) for seed in range(7)] + [("postgresql", 7)]


@pytest.fixture
def store(each_database: str) -> Store:
    with Store.open(each_database, create=True) as opened:
        yield opened


def fill(store: Store, seed: int) -> None:
    """Sweeps of two GPUs, drivers and versions in any order, finished and not; published and static rows."""
    generator = random.Random(seed)
    import_file(store, ROOT / "sweeps" / "published" / "kernels.csv")
    for device in generator.sample([H100, H200, NEWER_DRIVER], 3):
        for version in generator.sample([KERNEL, NEWER_KERNEL], 2):
            sweep = begin(store, device, f"{device.driver} {version.source_hash}")
            for K in generator.sample([1024, 2048, 5120], 2):
                for block in (32, 64, 128):
                    made = row(generator.uniform(90, 110), of=problem(K=K), config=config(block), device=device)
                    status = generator.choice([Status.OK, Status.OK, Status.OK, Status.CRASHED])
                    time_us = made.outcome.time_us if status is Status.OK else None
                    outcome = replace(made.outcome, status=status, time_us=time_us)
                    store.add(sweep, replace(made, version=version, outcome=outcome))
                if generator.random() < 0.7:
                    store.mark_complete(sweep, subject(problem(K=K), device, version), 3)
    store.add(sweep, row(None, kind=Kind.STATIC, of=problem(K=1024)))


@pytest.mark.parametrize(("each_database", "seed"), SEEDS, indirect=["each_database"])
def test_what_cannot_compete_makes_no_difference(store: Store, seed: int) -> None:
    fill(store, seed)
    everything, some = store.evidence(), store.evidence(keep=ranking.competing)
    assert len(some) < len(everything)
    assert ranking.winners(some) == ranking.winners(everything)
    for arch in ("sm_90", "gfx942"):
        narrowed = store.evidence(arch=arch, keep=ranking.competing)
        assert export.render(narrowed, arch) == export.render(everything, arch)


def fill_finals(store: Store, seed: int) -> None:
    """Problems with no finals, finals, finals twice and finals that were broken off; some finalists fail, or all do."""
    generator = random.Random(seed)
    blocks = (32, 64, 128)
    finished_sweep(store, {problem(K=512 * k): {config(b): 100.0 + b / 64 for b in blocks} for k in range(1, 9)})
    for sweep in (begin(store, request="finals"), begin(store, request="again", again=True)):
        for k in range(1, 9):
            finalists = generator.sample(blocks, generator.choice([0, 2, 2]))
            timed = []
            for block, process, round in itertools.product(finalists, ("final 00", "final 01", "final 02"), range(3)):
                made = row(generator.uniform(100, 101), of=problem(K=512 * k), config=config(block))
                for stage in ("final", "duplicate") if block == 64 else ("final",):
                    timed.append(replace(made, stage=stage, process=process, round=round))
            store.add_many(sweep, timed)
            if finalists and generator.random() < 0.9:
                end_finals(store, sweep, problem(K=512 * k))
            for block in finalists[: generator.choice([0, 0, 0, 1, 2])]:
                failed = row(None, of=problem(K=512 * k), config=config(block), status=Status.CRASHED)
                store.add(sweep, replace(failed, stage="final", process="final 03"))


@pytest.mark.parametrize(("each_database", "seed"), SEEDS, indirect=["each_database"])
def test_what_did_not_reach_the_finals_makes_no_difference_to_a_pick(store: Store, seed: int) -> None:
    fill(store, seed)
    fill_finals(store, seed)
    everything = store.evidence(keep=ranking.competing)
    finalists = store.evidence(keep=ranking.competing, finalists_only=True)
    assert len(finalists) < len(everything)
    assert {len(item.finals) for item in finalists} >= {0, 3}
    assert ranking.winners(finalists) == ranking.winners(everything)


def test_a_pick_whose_finalists_all_failed_is_the_screens(store: Store) -> None:
    finished_sweep(store, {problem(): {config(32): 100.0, config(64): 90.0, config(128): 95.0}})
    sweep = begin(store, request="finals")
    for block in (32, 64):
        store.add(sweep, row(80.0, config=config(block), stage="final", process="final 00"))
    end_finals(store, sweep)
    (pick,) = ranking.winners(store.evidence(keep=ranking.competing, finalists_only=True))
    assert pick.time_us == pytest.approx(80.0)
    for block in (32, 64):
        failed = row(None, config=config(block), stage="final", process="final 01", status=Status.CRASHED)
        store.add(sweep, failed)
    (pick,) = ranking.winners(store.evidence(keep=ranking.competing, finalists_only=True))
    assert (pick.config, pick.time_us) == (config(128), 95.0)


def test_pools_without_timings_are_all_kept() -> None:
    pools = [
        ComparableRows(problem(), H100, kind, KERNEL, True, 0.0)
        for kind in (Kind.STATIC, Kind.INTERPRETER, Kind.MEASURED)
    ]
    assert ranking.competing(pools) == pools


def test_a_pool_competes_by_kind_then_end_then_age() -> None:
    def pool(kind: Kind, complete: bool, newest: float) -> ComparableRows:
        return ComparableRows(problem(), H100, kind, KERNEL, complete, newest)

    first = pool(Kind.MEASURED, True, 1.0)
    others = [pool(Kind.MEASURED, False, 9.0), pool(Kind.PUBLISHED, True, 9.0), pool(Kind.MEASURED, True, 0.5)]
    assert ranking.competing([*others, first]) == [first]


def test_finals_are_not_replaced_by_a_screen_but_by_one_of_a_newer_version() -> None:
    finals = ComparableRows(problem(), H100, Kind.MEASURED, KERNEL, True, 1.0, has_finals=True)
    screen = replace(finals, device=NEWER_DRIVER, newest=2.0, has_finals=False)
    assert ranking.competing([finals, screen]) == [finals]
    newer_finals = replace(screen, has_finals=True)
    assert ranking.competing([finals, screen, newer_finals]) == [newer_finals]
    assert ranking.competing([replace(finals, complete=False), screen]) == [screen]
    newer = replace(screen, version=NEWER_KERNEL)
    assert ranking.competing([finals, newer]) == [newer]


def test_another_machines_screen_is_no_reason_to_forget_finals(store: Store) -> None:
    finished_sweep(store, {problem(): {config(32): 100.0, config(64): 90.0}})
    sweep = begin(store, request="finals")
    for block, process in itertools.product((32, 64), ("final 00", "final 01")):
        store.add(sweep, row(90.0 + block / 64, config=config(block), stage="final", process=process))
    end_finals(store, sweep)
    finished_sweep(store, {problem(): {config(32): 80.0, config(64): 95.0}}, NEWER_DRIVER)
    for evidence in (store.evidence(), store.evidence(keep=ranking.competing)):
        (pick,) = ranking.winners(evidence)
        assert (pick.device, pick.n) == (H100, 2)
        assert pick.verdict is not PickVerdict.QUICK


def test_a_new_time_of_an_old_version_makes_it_the_newest(store: Store) -> None:
    finished_sweep(store, {problem(): {config(): 100.0}})
    newer = begin(store, request="newer")
    store.add(newer, row(90.0, version=NEWER_KERNEL))
    store.mark_complete(newer, subject(version=NEWER_KERNEL), 1)
    (item,) = store.evidence(keep=ranking.competing)
    assert item.version == NEWER_KERNEL
    store.add(begin(store, again=True), row(95.0, process="w2"))
    (item,) = store.evidence(keep=ranking.competing)
    assert item.version == KERNEL
