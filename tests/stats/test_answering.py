from __future__ import annotations

import math
from dataclasses import replace

import pytest
from database_rows import AXES, H100, H200, KERNEL, config, evidence, installed, only_study, problem, studies_of
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.ceiling import ceiling_of
from fp8tune.records import Kind, NamedInts, Status
from fp8tune.stats.pairs import canonical_order
from fp8tune.stats.shared import choose_shared

NEWER = replace(KERNEL, source_hash="bbbb")


def test_the_fastest_config_wins_by_the_median_of_its_processes():
    study = only_study(
        evidence(90.0, 100.0, 101.0, config=config(32)),
        evidence(95.0, 96.0, 200.0, config=config(64), bytes_moved=96_000_000, ceiling_gb_per_s=2000.0),
    )
    assert (study.pick.config, study.choice.time_us, study.choice.processes) == (config(64), 96.0, 3)
    assert (study.next_best.config, study.next_best.time_us, study.next_best.ratio) == (config(32), 100.0, 100.0 / 96.0)
    assert ceiling_of(study).share == 0.5  # 96 MB in 96 us is 1,000 GB/s
    assert study.lookup_key == NamedInts(K=5120, G=64)


def test_a_lone_config_has_no_next_best():
    study = only_study(evidence(90.0))
    assert (study.next_best, study.choice.ratio, ceiling_of(study)) == (None, None, None)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (config(stages=1, warps=8), config(stages=2, warps=4)),
        (config(warps=4, block=128), config(warps=8, block=32)),
        (config(block=64), config(block=128)),
    ],
)
def test_within_one_percent_the_canonical_order_decides(better, worse):
    assert only_study(evidence(100.9, config=better), evidence(100.0, config=worse)).pick.config == better
    assert only_study(evidence(101.1, config=better), evidence(100.0, config=worse)).pick.config == worse


@pytest.mark.parametrize(("time_us", "stays"), [(101.4, True), (101.6, False)])
def test_a_screen_leaves_the_committed_config_its_place_within_the_keep_band(time_us, stays):
    times_us = {128: time_us, 32: 100.9, 64: 100.0}
    rows = [evidence(time_us, config=config(block)) for block, time_us in times_us.items()]
    table = installed((KERNEL.kernel, "", tuple(sorted(rows[0].lookup_key.items())), tuple(config(128).items())))
    published_rows = [replace(row, kind=Kind.PUBLISHED) for row in rows]
    for size, pick in ((rows, config(128 if stays else 32)), (published_rows, config(32))):
        (study,) = studies_of(size, table)
        assert study.pick.config == pick


def test_the_declared_order_of_values_counts_not_their_size():
    descending = replace(KERNEL, axes=(("BLOCK_SIZE", (128, 64, 32)), *AXES[1:]))
    rows = [evidence(100.0, config=config(block), version=descending) for block in (32, 64, 128)]
    assert only_study(*rows).pick.config == config(128)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_only_ok_rows_rank(status):
    assert studies_of([evidence(90.0, status=status)]) == []


@pytest.mark.parametrize("kind", [Kind.INTERPRETER, Kind.STATIC])
def test_what_was_not_timed_on_a_gpu_never_ranks(kind):
    assert studies_of([evidence(90.0, kind=kind)]) == []
    assert only_study(evidence(90.0, kind=kind), evidence(100.0)).choice.time_us == 100.0


def test_rows_without_a_time_do_not_rank():
    assert studies_of([evidence()]) == []


def test_the_newest_complete_version_wins_and_versions_do_not_mix():
    old = [evidence(80.0, config=config(32), newest=1.0), evidence(85.0, config=config(64), newest=1.0)]
    new = [evidence(90.0, config=config(64), version=NEWER, newest=2.0)]
    assert only_study(*old, *new).version == NEWER
    begun = [replace(item, complete=False) for item in new]
    assert only_study(*old, *begun).version == KERNEL
    begun_both = [replace(item, complete=False) for item in [*old, *new]]
    study = only_study(*begun_both)
    assert (study.version, study.complete, study.next_best) == (NEWER, False, None)


def test_each_device_has_its_own_winner():
    result = studies_of([evidence(80.0), evidence(70.0, device=H200)])
    assert [(item.device.name, item.choice.time_us) for item in result] == [(H100.name, 80.0), (H200.name, 70.0)]


def published(time_us: float, **others: object):
    size = replace(problem(), routing="unstated", scale_mode="unstated")
    return evidence(time_us, size=size, kind=Kind.PUBLISHED, version=None, device=replace(H100, name="other"), **others)


def test_published_rows_rank_below_measured_ones_of_the_same_shape():
    rows = [published(10.0), evidence(100.0)]
    assert [item.kind for item in studies_of(rows)] == [Kind.MEASURED]
    rows[1] = evidence(100.0, size=problem(K=2048))
    assert [item.kind for item in studies_of(rows)] == [Kind.MEASURED, Kind.PUBLISHED]


def test_a_published_row_that_names_its_config_is_picked_before_one_that_does_not():
    rows = [published(245.9, config=None), published(492.0)]
    study = only_study(*rows)
    assert (study.pick.config, study.choice.time_us, study.next_best) == (config(), 492.0, None)
    assert only_study(rows[0]).pick.config is None


times = st.dictionaries(
    st.tuples(
        st.sampled_from([32, 64, 128]),
        st.sampled_from([4, 8]),
        st.sampled_from([1, 2]),
        st.sampled_from([1024, 2048]),
        st.sampled_from([KERNEL, NEWER]),
        st.sampled_from([H100, H200]),
    ),
    st.lists(st.sampled_from([99.5, 100.0, 100.5, 102.0]), min_size=1, max_size=4),
    min_size=1,
)


@given(times, st.randoms(use_true_random=False))
def test_any_order_of_rows_gives_the_same_winners(measured, generator):
    rows = [
        evidence(*values, size=problem(K=K), config=config(block, warps, stages), device=device, version=version)
        for (block, warps, stages, K, version, device), values in measured.items()
    ]
    result, again = studies_of(rows), studies_of(generator.sample(rows, len(rows)))
    assert [(s.problem, s.device, s.version, s.choice) for s in result] == [
        (s.problem, s.device, s.version, s.choice) for s in again
    ]
    assert choose_shared(again) == choose_shared(result)


def shape_times(**times_us: tuple[float, ...]):
    """One row a shape and config: ``k1024=(time of block 32, 64, 128)``."""
    return [
        evidence(time_us, size=problem(K=int(name[1:])), config=config(block))
        for name, values in times_us.items()
        for block, time_us in zip((32, 64, 128), values, strict=False)
    ]


def test_the_robust_config_loses_nowhere_more_than_five_percent():
    rows = shape_times(k1024=(100.0, 104.0, 101.0), k2048=(106.0, 100.0, 102.0))
    shared = choose_shared(studies_of(rows))
    assert (shared.config, shared.worst) == (config(128), 1.02)
    assert shared.mean == pytest.approx(math.sqrt(1.01 * 1.02))


def test_where_none_stays_within_five_percent_the_least_worst_is_choose_shared():
    rows = shape_times(k1024=(100.0, 120.0, 109.0), k2048=(130.0, 100.0, 110.0))
    assert choose_shared(studies_of(rows)).config == config(128)


def test_a_config_must_cover_every_complete_problem_to_be_choose_shared():
    assert choose_shared(studies_of(shape_times(k1024=(100.0,), k2048=(100.0, 90.0)))).config == config(32)
    apart = [evidence(100.0, size=problem(K=1024)), evidence(90.0, size=problem(K=2048), config=config(64))]
    assert choose_shared(studies_of(apart)) is None
    begun = [apart[0], replace(apart[1], complete=False)]
    assert choose_shared(studies_of(begun)).config == config()
    assert choose_shared([]) is None


def test_a_config_with_values_nobody_declared_still_has_a_place():
    order = [canonical_order(AXES)(config(block)) for block in (32, 64, 128, 256, 16)]
    assert order[:3] == sorted(order[:3])
    assert max(order[:3]) < min(order[3:])
