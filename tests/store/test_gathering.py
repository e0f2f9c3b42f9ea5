"""Studies that are left out before results are read must make no difference to who wins."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
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
def store(each_database: str) -> Iterator[Store]:
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
                trials = []
                for block in (32, 64, 128):
                    made = row(generator.uniform(90, 110), size=problem(K=K), config=config(block), device=device)
                    status = generator.choice([Status.OK, Status.OK, Status.OK, Status.CRASHED])
                    time_us = made.outcome.time_us if status is Status.OK else None
                    outcome = replace(made.outcome, status=status, time_us=time_us, reason="" if time_us else "gone")
                    trials.append(replace(made, version=version, outcome=outcome))
                store.add_many(sweep, trials)
                if generator.random() < 0.7:
                    store.mark_complete(sweep, subject(problem(K=K), device, version), 3)
    store.add(sweep, row(None, kind=Kind.STATIC, size=problem(K=1024)))


@pytest.mark.parametrize(("each_database", "seed"), SEEDS, indirect=["each_database"])
def test_what_cannot_compete_makes_no_difference(store: Store, seed: int) -> None:
    fill(store, seed)
    everything, some = store.studies(), store.studies(keep=competing)
    assert len(some) < len(everything)
    assert decided(some) == decided(everything)
    for arch in ("sm_90", "gfx942"):
        narrowed = store.studies(arch=arch, keep=competing)
        assert table_text(narrowed, arch) == table_text(everything, arch)


def pool(kind: Kind = Kind.MEASURED, newest: float = 0.0, **values: bool) -> Study:
    return Study(problem(), H100, kind, KERNEL, newest=newest, **values)


FIRST, FINALS = pool(newest=1.0), pool(newest=1.0, has_finals=True)
SCREEN = replace(FINALS, device=NEWER_DRIVER, newest=2.0, has_finals=False)
UNTIMED = [pool(kind) for kind in (Kind.STATIC, Kind.INTERPRETER, Kind.MEASURED)]


@pytest.mark.parametrize(
    ("pools", "left"),
    [
        (UNTIMED, UNTIMED),
        # By kind, then end, then age.
        ([pool(newest=9.0, complete=False), pool(Kind.PUBLISHED, 9.0), pool(newest=0.5), FIRST], [FIRST]),
        # A screen of another machine is no reason to forget finals; those of it, or a newer version, are.
        ([FINALS, SCREEN], [FINALS]),
        ([FINALS, SCREEN, replace(SCREEN, has_finals=True)], [replace(SCREEN, has_finals=True)]),
        ([replace(FINALS, complete=False), SCREEN], [SCREEN]),
        ([FINALS, replace(SCREEN, version=NEWER_KERNEL)], [replace(SCREEN, version=NEWER_KERNEL)]),
    ],
)
def test_pools_that_compete(pools: list[Study], left: list[Study]) -> None:
    assert competing(pools) == left


def test_finals_count_until_their_configs_fail_or_newer_finals_come(store: Store) -> None:
    finished_sweep(store, {problem(): {config(32): 100.0, config(64): 90.0, config(128): 95.0}})
    sweep = begin(store, request="finals")
    for block, process in itertools.product((32, 64), ("final 00", "final 01")):
        store.add(sweep, row(90.0 + block / 64, config=config(block), stage="final", process=process))
    end_finals(store, sweep)
    finished_sweep(store, {problem(): {config(32): 80.0, config(64): 95.0}}, NEWER_DRIVER)
    for evidence in (store.studies(), store.studies(keep=competing)):
        (study,) = decided(evidence)
        assert (study.device, study.choice.processes) == (H100, 2)
        assert study.choice.verdict is not Verdict.QUICK
    for block in (32, 64):
        failed = row(None, config=config(block), stage="final", process="final 02", status=Status.CRASHED)
        store.add(sweep, failed)
    (study,) = decided(store.studies(device=H100, keep=competing))
    assert (study.pick.config, study.choice.time_us) == (config(128), 95.0)


def test_a_new_time_of_an_old_version_makes_it_the_newest(store: Store) -> None:
    finished_sweep(store, {problem(): {config(): 100.0}})
    newer = begin(store, request="newer")
    store.add(newer, row(90.0, version=NEWER_KERNEL))
    store.mark_complete(newer, subject(version=NEWER_KERNEL), 1)
    assert [item.version for item in store.studies(keep=competing)] == [NEWER_KERNEL]
    store.add(begin(store, again=True), row(95.0, process="w2"))
    assert [item.version for item in store.studies(keep=competing)] == [KERNEL]
