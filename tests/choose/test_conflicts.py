from __future__ import annotations

from dataclasses import replace

from database_rows import config, evidence, problem
from places import PUBLISHED

from fp8tune.choose.candidates import value_us
from fp8tune.choose.conflicts import conflicts
from fp8tune.choose.ranking import all_candidates, robust
from fp8tune.records import Device, Kind, NamedInts
from fp8tune.store import importing
from fp8tune.store.results import Store

MI300X = Device("gfx942", "AMD Instinct MI300X")


def published(time_us: float, source: str, **others):
    others = {"device": MI300X, "config": config()} | others
    return evidence(time_us, kind=Kind.PUBLISHED, version=None, source=source, **others)


def test_the_best_of_two_sources_far_apart_is_a_conflict():
    rows = [published(500.0, "a/b#1"), published(900.0, "a/b#1"), published(250.0, "c/d#2", config=None)]
    (found,) = conflicts(rows)
    assert [(value_us(item), item.source) for item in found.rows] == [(250.0, "c/d#2"), (500.0, "a/b#1")]
    assert found.ratio == 2.0
    assert conflicts(reversed(rows)) == [found]


def test_sources_that_agree_or_speak_of_other_things_do_not():
    first = published(100.0, "a/b#1")
    others = [
        published(109.0, "c/d#2"),
        published(300.0, "a/b#1"),
        published(300.0, "c/d#2", of=problem(K=64)),
        published(300.0, "c/d#2", of=replace(problem(), input_layout="transposed")),
        published(300.0, "c/d#2", device=replace(MI300X, name="AMD Instinct MI325X")),
        replace(published(300.0, "c/d#2"), kind=Kind.MEASURED),
    ]
    for other in others:
        assert conflicts([first, other]) == []


def test_the_conflicts_among_the_published_rows_that_come_with_fp8tune(tmp_path):
    with Store.open(str(tmp_path / "a.db"), create=True) as store:
        importing.import_file(store, PUBLISHED)
        rows = store.evidence()
    found = {
        (item.problem.kernel, str(item.problem.shape)): [value_us(row) for row in item.rows] for item in conflicts(rows)
    }
    assert found == {
        ("transpose-3d-atomic", "E=128 N=8192 K=5120"): [10430.0, 23637.8],
        ("transpose-3d-atomic", "E=128 N=5120 K=8192"): [10400.0, 23643.9],
        ("colwise", "M=16640 K=5120 G=64"): [245.9, 492.0],
    }
    colwise = all_candidates(row for row in rows if row.problem.kernel == "colwise")
    best = robust(colwise)
    assert best is not None
    assert best.config == NamedInts(BLOCK_SIZE=32, BLOCK_SIZE_ITER=128, num_warps=4)
    assert best.worst_slowdown == 1.215
    losses = [each.slowdowns[best.config] for each in colwise if best.config in each.slowdowns]
    assert sorted(losses) == [1.0, 218 / 217, 515 / 486, 1.215]
