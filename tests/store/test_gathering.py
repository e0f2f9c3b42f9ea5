"""One record a candidate: what is left out before a record is made must make no difference to who wins."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from database_rows import (
    H100,
    H200,
    KERNEL,
    begin,
    config,
    end_finals,
    finished_sweep,
    import_file,
    problem,
    row,
    subject,
    table_text,
)
from places import ROOT

from fp8tune.records import Kind, Status
from fp8tune.stats.rank import competing
from fp8tune.stats.study import Study, Verdict
from fp8tune.store.results import Store
from fp8tune.studies import decided

NEWER_DRIVER = replace(H100, driver="590.1")
NEWER_KERNEL = replace(KERNEL, source_hash="bbbb")


SEEDS = [("sqlite", seed) for seed in range(2)] + [("postgresql", 7)]


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
                    outcome = replace(made.outcome, status=status, time_us=time_us, reason="" if time_us else "gone")
                    store.add(sweep, replace(made, version=version, outcome=outcome))
                if generator.random() < 0.7:
                    store.mark_complete(sweep, subject(problem(K=K), device, version), 3)
    store.add(sweep, row(None, kind=Kind.STATIC, of=problem(K=1024)))


@pytest.mark.parametrize(("each_database", "seed"), SEEDS, indirect=["each_database"])
def test_what_cannot_compete_makes_no_difference(store: Store, seed: int) -> None:
    fill(store, seed)
    everything, some = store.studies(), store.studies(keep=competing)
    assert len(some) < len(everything)
    assert decided(some) == decided(everything)
    for arch in ("sm_90", "gfx942"):
        narrowed = store.studies(arch=arch, keep=competing)
        assert table_text(narrowed, arch) == table_text(everything, arch)


def test_a_pick_whose_finalists_all_failed_is_the_screens(store: Store) -> None:
    finished_sweep(store, {problem(): {config(32): 100.0, config(64): 90.0, config(128): 95.0}})
    sweep = begin(store, request="finals")
    for block in (32, 64):
        store.add(sweep, row(80.0, config=config(block), stage="final", process="final 00"))
    end_finals(store, sweep)
    (study,) = decided(store.studies(keep=competing))
    assert study.choice.time_us == pytest.approx(80.0)
    for block in (32, 64):
        failed = row(None, config=config(block), stage="final", process="final 01", status=Status.CRASHED)
        store.add(sweep, failed)
    (study,) = decided(store.studies(keep=competing))
    assert (study.pick.config, study.choice.time_us) == (config(128), 95.0)


def pool(kind: Kind, newest: float = 0.0, *, complete: bool = True, has_finals: bool = False) -> Study:
    return Study(problem(), H100, kind, KERNEL, complete=complete, has_finals=has_finals, newest=newest)


def test_pools_without_timings_are_all_kept() -> None:
    pools = [pool(kind) for kind in (Kind.STATIC, Kind.INTERPRETER, Kind.MEASURED)]
    assert competing(pools) == pools


def test_a_pool_competes_by_kind_then_end_then_age() -> None:
    first = pool(Kind.MEASURED, 1.0)
    others = [pool(Kind.MEASURED, 9.0, complete=False), pool(Kind.PUBLISHED, 9.0), pool(Kind.MEASURED, 0.5)]
    assert competing([*others, first]) == [first]


def test_finals_are_not_replaced_by_a_screen_but_by_one_of_a_newer_version() -> None:
    finals = pool(Kind.MEASURED, 1.0, has_finals=True)
    screen = replace(finals, device=NEWER_DRIVER, newest=2.0, has_finals=False)
    assert competing([finals, screen]) == [finals]
    newer_finals = replace(screen, has_finals=True)
    assert competing([finals, screen, newer_finals]) == [newer_finals]
    assert competing([replace(finals, complete=False), screen]) == [screen]
    newer = replace(screen, version=NEWER_KERNEL)
    assert competing([finals, newer]) == [newer]


def test_another_machines_screen_is_no_reason_to_forget_finals(store: Store) -> None:
    finished_sweep(store, {problem(): {config(32): 100.0, config(64): 90.0}})
    sweep = begin(store, request="finals")
    for block, process in itertools.product((32, 64), ("final 00", "final 01")):
        store.add(sweep, row(90.0 + block / 64, config=config(block), stage="final", process=process))
    end_finals(store, sweep)
    finished_sweep(store, {problem(): {config(32): 80.0, config(64): 95.0}}, NEWER_DRIVER)
    for evidence in (store.studies(), store.studies(keep=competing)):
        (study,) = decided(evidence)
        assert (study.device, study.choice.processes) == (H100, 2)
        assert study.choice.verdict is not Verdict.QUICK


def test_a_new_time_of_an_old_version_makes_it_the_newest(store: Store) -> None:
    finished_sweep(store, {problem(): {config(): 100.0}})
    newer = begin(store, request="newer")
    store.add(newer, row(90.0, version=NEWER_KERNEL))
    store.mark_complete(newer, subject(version=NEWER_KERNEL), 1)
    (item,) = store.studies(keep=competing)
    assert item.version == NEWER_KERNEL
    store.add(begin(store, again=True), row(95.0, process="w2"))
    (item,) = store.studies(keep=competing)
    assert item.version == KERNEL
