"""One record a candidate: what is left out before a record is made must make no difference to who wins."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, H200, KERNEL, begin, config, finished_sweep, problem, row
from places import ROOT

from fp8tune.choose import ranking
from fp8tune.export import table as export
from fp8tune.records import Kind, Pool, Status
from fp8tune.store.importing import import_file
from fp8tune.store.results import Store

NEWER_DRIVER = replace(H100, driver="590.1")
NEWER_KERNEL = replace(KERNEL, source_hash="bbbb")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with Store.open(str(tmp_path / "results.db"), create=True) as opened:
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
                    store.mark_complete(sweep, version, device, problem(K=K), 3)
    store.add(sweep, row(None, kind=Kind.STATIC, of=problem(K=1024)))


@pytest.mark.parametrize("seed", range(20))
def test_what_cannot_compete_makes_no_difference(store: Store, seed: int) -> None:
    fill(store, seed)
    everything, some = store.evidence(), store.evidence(keep=ranking.competing)
    assert len(some) < len(everything)
    assert ranking.winners(some) == ranking.winners(everything)
    for arch in ("sm_90", "gfx942"):
        narrowed = store.evidence(arch=arch, keep=ranking.competing)
        assert export.render(narrowed, arch) == export.render(everything, arch)


def test_pools_without_timings_are_all_kept() -> None:
    pools = [Pool(problem(), H100, kind, KERNEL, True, 0.0) for kind in (Kind.STATIC, Kind.INTERPRETER, Kind.MEASURED)]
    assert ranking.competing(pools) == pools


def test_a_pool_competes_by_kind_then_end_then_age() -> None:
    def pool(kind: Kind, complete: bool, newest: float) -> Pool:
        return Pool(problem(), H100, kind, KERNEL, complete, newest)

    first = pool(Kind.MEASURED, True, 1.0)
    others = [pool(Kind.MEASURED, False, 9.0), pool(Kind.PUBLISHED, True, 9.0), pool(Kind.MEASURED, True, 0.5)]
    assert ranking.competing([*others, first]) == [first]


def test_a_new_time_of_an_old_version_makes_it_the_newest(store: Store) -> None:
    finished_sweep(store, {problem(): {config(): 100.0}})
    newer = begin(store, request="newer")
    store.add(newer, row(90.0, version=NEWER_KERNEL))
    store.mark_complete(newer, NEWER_KERNEL, H100, problem(), 1)
    (item,) = store.evidence(keep=ranking.competing)
    assert item.version == NEWER_KERNEL
    store.add(begin(store, again=True), row(95.0, process="w2"))
    (item,) = store.evidence(keep=ranking.competing)
    assert item.version == KERNEL
