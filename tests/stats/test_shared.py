from __future__ import annotations

import math
from dataclasses import replace

import pytest
from database_rows import H100, H200, KERNEL, config, evidence, key_of, problem, studies_of
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.records import Kind, NamedInts, Status
from fp8tune.stats.shared import HeldOut, choose_shared, cover, hold_out, prefers_nearest
from fp8tune.stats.study import Study
from fp8tune.tables import select
from fp8tune.tables.select import nearest_of
from fp8tune_kernels.spec import Span
from fp8tune_kernels.tables import Row


def measured_at(times_us: dict[int, tuple[float, ...]], routing: str = "jagged") -> list[Study]:
    """K -> the times of blocks 32, 64 and 128, in microseconds."""
    return studies_of(
        [
            evidence(time_us, size=problem(K=K, routing=routing), config=config(block))
            for K, times in times_us.items()
            for block, time_us in zip((32, 64, 128), times, strict=False)
        ]
    )


def held(studies, rows: list[Row] = (), others=()) -> dict[int, HeldOut]:
    """K -> what is held out."""
    return {item.study.problem.shape["K"]: item for item in hold_out(studies, others, nearest_of(list(rows)))}


def keyed(K: int, block: int, device: str = "") -> Row:
    """A row of a table."""
    return "colwise", device, tuple(sorted(key_of(problem(K=K)).items())), tuple(config(block).items())


THREE = {1024: (100.0, 103.0, 120.0), 2048: (102.0, 100.0, 120.0), 4096: (125.0, 110.0, 100.0)}


def test_each_shape_is_held_out_with_what_the_others_chose():
    """By hand: 1024 and 2048 share 32 or 64; 4096 with either leaves the least worst, which is 64."""
    fallback = {K: item.fallback for K, item in held(measured_at(THREE)).items()}
    assert fallback == {1024: 1.03, 2048: 1.0, 4096: 1.25}


def test_a_shape_is_left_out_with_all_its_routings():
    studies = measured_at(THREE) + measured_at({1024: (100.0, 200.0, 50.0)}, "zipf")
    (zipf,) = [item for item in hold_out(studies, (), nearest_of([])) if item.study.problem.routing == "zipf"]
    assert zipf.fallback == 4.0


def test_one_shape_leaves_nothing_to_choose_from():
    single = measured_at({1024: (100.0,)})
    assert not held([])
    assert not held(measured_at({1024: (100.0, 101.0)}))
    assert not held(single + measured_at({1024: (100.0,)}, "zipf"))


def test_shapes_under_one_key_are_left_out_together():
    """M is not in the key: the other M would say what it was."""
    rows = [
        evidence(time_us, size=problem(K=K, M=M), config=config(block))
        for K, M, times in ((1024, 16640, (100.0, 200.0)), (1024, 32000, (100.0, 200.0)), (2048, 16640, (200.0, 100.0)))
        for block, time_us in zip((32, 64), times, strict=True)
    ]
    assert [item.fallback for item in hold_out(studies_of(rows), (), nearest_of([]))] == [2.0, 2.0, 2.0]
    assert not held(studies_of(rows[:4]))


def test_a_config_without_a_time_is_unknown_and_one_that_failed_is_infinitely_slow():
    untimed = measured_at({1024: (100.0, 90.0), 2048: (100.0,)})
    assert {K: item.fallback for K, item in held(untimed).items()} == {1024: 100.0 / 90.0, 2048: None}
    failed = evidence(status=Status.WRONG, size=problem(K=2048), config=config(64))
    rows = [evidence(90.0, size=problem(K=K), config=config(block)) for K, block in ((1024, 64), (2048, 32))]
    assert held(studies_of([*rows, failed]))[2048].fallback == math.inf


def test_where_nothing_covers_the_others_the_default_is_judged():
    default = config(64, stages=2)
    rows = [
        evidence(90.0, size=problem(K=1024), config=config(32)),
        evidence(90.0, size=problem(K=2048), config=config(128)),
        evidence(120.0, size=problem(K=4096), config=default),
        evidence(80.0, size=problem(K=4096), config=config(32)),
    ]
    assert held(studies_of(rows))[4096].fallback == 1.5


def test_a_problem_not_swept_to_its_end_is_no_judge():
    rows = [evidence(100.0, size=problem(K=K)) for K in (1024, 2048)]
    begun = evidence(100.0, size=problem(K=4096), complete=False)
    assert held(studies_of([*rows, begun])).keys() == {1024, 2048}


times = st.lists(st.floats(10.0, 1000.0), min_size=3, max_size=3).map(tuple)


@given(st.dictionaries(st.sampled_from([512, 1024, 2048, 4096, 8192]), times, min_size=2), st.randoms())
def test_any_times_give_slowdowns_that_the_others_choice_explains(times_us, generator):
    studies = measured_at(times_us)
    held_out = held(studies)
    assert held_out.keys() == times_us.keys()
    for K, item in held_out.items():
        chosen = choose_shared(study for study in studies if study.problem.shape["K"] != K).config
        own = times_us[K]
        assert item.fallback == pytest.approx(own[(32, 64, 128).index(chosen["BLOCK_SIZE"])] / min(own))
    again = held(generator.sample(studies, len(studies)))
    assert {K: item.fallback for K, item in again.items()} == {K: item.fallback for K, item in held_out.items()}


# The row of the nearest key


def test_each_shape_is_judged_by_the_nearest_row_but_its_own():
    """By hand: 1024 and 2048 are nearest to each other, and 4096 to 2048."""
    rows = [keyed(1024, 32), keyed(2048, 64), keyed(4096, 128)]
    nearest = {K: item.nearest for K, item in held(measured_at(THREE), rows).items()}
    assert nearest == {1024: 1.03, 2048: 1.02, 4096: 1.1}
    assert all(item.nearest == item.fallback for item in held(measured_at(THREE)).values())  # no key to compare


def test_a_device_is_judged_by_its_own_nearest_rows_and_no_other_devices():
    studies = studies_of(
        evidence(time_us, size=problem(K=K), config=config(block), device=device)
        for device in (H100, H200)
        for K in (1024, 2048)
        for block, time_us in ((32, 100.0), (64, 110.0), (128, 120.0))
    )
    rows = [keyed(1024, 32), keyed(1024, 64, H200.name), keyed(2048, 32), keyed(2048, 128, H200.name)]
    held_out = hold_out(studies[:2], studies[2:], nearest_of(rows))
    assert [item.nearest for item in held_out] == [1.0, 1.2, 1.0, 1.1]
    assert [item.fallback for item in held_out] == [1.0] * 4


def test_held_out_losses_are_judged_by_the_rule_of_lookups(monkeypatch):
    """A tile of 64 holds what is reduced over up to 64 groups, and is no answer for 256; 32 read twice all along."""
    monkeypatch.setitem(select.SPANS, "colwise", Span("BLOCK_SIZE", "G"))
    size = {G: replace(problem(), shape=NamedInts(problem().shape, G=G)) for G in (16, 64, 256)}
    rows = [
        evidence(time_us, size=single, config=config(block))
        for single in size.values()
        for block, time_us in ((8, 110.0), (64, 100.0))
    ]
    table = [
        ("colwise", "", tuple(sorted(key_of(single).items())), tuple(config(8 if G == 16 else 64).items()))
        for G, single in size.items()
    ]
    near = {item.study.problem.shape["G"]: item.nearest for item in hold_out(studies_of(rows), (), nearest_of(table))}
    assert near == {16: 1.0, 64: 1.1, 256: 1.1}


# Which loses less


def both(fallback: tuple[float | None, ...], nearest: tuple[float | None, ...]) -> list[HeldOut]:
    study = Study(problem(), H100, Kind.MEASURED, KERNEL)
    return [HeldOut(study, *pair) for pair in zip(fallback, nearest, strict=True)]


@pytest.mark.parametrize(
    ("fallback", "nearest", "takes_nearest"),
    [
        pytest.param((1.1, 1.1), (1.0, 1.2), True, id="less in the geometric mean"),
        pytest.param((1.0, 1.2), (1.1, 1.1), False, id="more"),
        pytest.param((1.0, 1.2), (1.2, 1.0), False, id="the same"),
        pytest.param((1.5, 1.5), (1.0, math.inf), False, id="fails where the other does not"),
        pytest.param((1.5, math.inf), (1.4, 1.9), True, id="runs where the other does not"),
        pytest.param((1.5, None), (1.4, None), True, id="neither was timed"),
        pytest.param((None,), (1.0,), False, id="nothing to compare"),
    ],
)
def test_the_rule_is_the_one_that_loses_less_where_both_are_known(fallback, nearest, takes_nearest):
    assert prefers_nearest(both(fallback, nearest)) is takes_nearest


@pytest.mark.parametrize("current", [None, True])
def test_one_untimed_config_does_not_take_a_kernel_off_the_nearest_key(current):
    """It did: a sweep over a part of the grid leaves configs of other problems without a time."""
    held_out = both((1.3, 1.2, 1.3, 1.25), (1.0, 1.01, 1.0, None))
    assert prefers_nearest(held_out, current)


def test_with_fewer_than_three_quarters_known_the_current_rule_stays():
    held_out = both((1.3, 1.3, 1.3), (1.0, 1.0, None))
    assert [prefers_nearest(held_out, current) for current in (None, False, True)] == [False, False, True]
    assert not prefers_nearest(both((1.3,) * 4, (1.0, 1.0, 1.0, math.inf)), True)


@pytest.mark.parametrize(
    ("gains", "changes"),
    [
        ((1.5,), False),  # one problem proves nothing
        ((1.012, 1.013, 1.012, 1.013), False),  # less than the keep band
        ((1.03, 1.035, 1.03, 1.03, 1.04), True),
        ((1.4, 1.0, 1.2, 1.0, 1.1, 1.0, 1.3, 1.2), True),
    ],
)
def test_the_committed_rule_stays_until_the_other_is_proven_to_lose_less(gains, changes):
    flat = (1.0,) * len(gains)
    assert prefers_nearest(both(gains, flat))
    assert prefers_nearest(both(gains, flat), current=True)
    assert prefers_nearest(both(gains, flat), current=False) is changes
    assert not prefers_nearest(both(flat, gains))
    assert not prefers_nearest(both(flat, gains), current=False)
    assert prefers_nearest(both(flat, gains), current=True) is not changes


# Few configs for many problems

A, B, C, D = (NamedInts(BLOCK=block, num_warps=4, num_stages=2) for block in (16, 32, 64, 128))
BLOCKS = (("BLOCK", (16, 32, 64, 128)),)


def test_the_fewest_configs_within_the_bound():
    problems = [{A: 1.0, C: 1.015}, {B: 1.0, C: 1.01}, {D: 1.0, C: 1.3, A: 1.05}]
    strict, loose, looser = (cover(problems, within, BLOCKS) for within in (0.0, 0.02, 0.3))
    assert (strict.configs, strict.worst) == ((A, B, D), 0)
    assert (loose.configs, loose.worst) == ((C, D), pytest.approx(0.015))
    assert looser.configs == (C,)
    assert cover([{A: 1.02, B: 1.0}, {A: 1.0, B: 1.01}], 0.02).configs == (B,)  # of least worst loss
    assert cover([{A: 1.0, D: 1.0}], 0.02, BLOCKS).configs == (A,)  # then the first in canonical order


@given(
    st.lists(st.dictionaries(st.sampled_from([A, B, C, D]), st.floats(1.0, 1.5), min_size=1), min_size=1),
    st.floats(0, 0.5),
)
def test_every_problem_has_a_config_within_the_bound_and_none_is_redundant(problems, within):
    result = cover(problems, within, BLOCKS)
    assert result.worst <= within + 1e-9
    for config_ in result.configs:
        rest = [c for c in result.configs if c != config_]
        assert any(all(row.get(c, 9.0) > (1 + within) * min(row.values()) for c in rest) for row in problems)


@pytest.mark.parametrize("problems", [[], [{}]])
def test_nothing_to_cover_is_refused(problems):
    with pytest.raises(ValueError, match="problem"):
        cover(problems, 0.02)
