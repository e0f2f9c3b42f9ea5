from __future__ import annotations

from dataclasses import replace

import pytest
from database_rows import H100, H200, config, evidence, key_of, problem
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.choose import heldout
from fp8tune.choose.heldout import HeldOut, LeftOut, Regret, leave_one_shape_out, nearest_loses_less
from fp8tune.choose.ranking import all_candidates, robust
from fp8tune.records import NamedInts
from fp8tune.stats.means import geomean
from fp8tune_kernels.spec import Span
from fp8tune_kernels.tables import Row


def contests_of(times_us: dict[int, tuple[float, ...]], routing: str = "jagged"):
    """K -> the times of blocks 32, 64 and 128, in microseconds."""
    return all_candidates(
        [
            evidence(time_us, of=problem(K=K, routing=routing), config=config(block))
            for K, times in times_us.items()
            for block, time_us in zip((32, 64, 128), times, strict=False)
        ]
    )


def robust_regret(found) -> Regret:
    return leave_one_shape_out(found, []).robust


def keyed(K: int, block: int, device: str = "") -> Row:
    """A row of a table."""
    return "colwise", device, tuple(sorted(key_of(problem(K=K)).items())), tuple(config(block).items())


THREE = {1024: (100.0, 103.0, 120.0), 2048: (102.0, 100.0, 120.0), 4096: (125.0, 110.0, 100.0)}


def test_each_shape_is_judged_by_what_the_others_chose():
    """By hand: 1024 and 2048 share 32 or 64; 4096 with either leaves the least worst, which is 64."""
    held_out = robust_regret(contests_of(THREE))
    found = {left.problem.shape["K"]: (left.config, left.slowdown) for left in held_out.problems}
    assert found == {1024: (config(64), 1.03), 2048: (config(64), 1.0), 4096: (config(32), 1.25)}
    assert held_out.geomean_slowdown == pytest.approx((1.03 * 1.0 * 1.25) ** (1 / 3))
    assert held_out.worst_slowdown == 1.25
    assert held_out.untimed == 0


def test_a_shape_is_left_out_with_all_its_routings():
    found = contests_of(THREE) + contests_of({1024: (100.0, 200.0, 50.0)}, "zipf")
    (zipf,) = [left for left in robust_regret(found).problems if left.problem.routing == "zipf"]
    assert (zipf.config, zipf.slowdown) == (config(64), 4.0)


def test_one_shape_leaves_nothing_to_choose_from():
    assert leave_one_shape_out([], []) is None
    assert leave_one_shape_out(contests_of({1024: (100.0, 101.0)}), []) is None
    assert leave_one_shape_out(contests_of({1024: (100.0,)}) + contests_of({1024: (100.0,)}, "zipf"), []) is None


def test_shapes_under_one_key_are_left_out_together():
    """M is not in the key: the other M would say what it was."""
    rows = [
        evidence(time_us, of=problem(K=K, M=M), config=config(block))
        for K, M, times in ((1024, 16640, (100.0, 200.0)), (1024, 32000, (100.0, 200.0)), (2048, 16640, (200.0, 100.0)))
        for block, time_us in zip((32, 64), times, strict=True)
    ]
    assert robust_regret(all_candidates(rows)).geomean_slowdown == 2.0
    assert leave_one_shape_out(all_candidates(rows[:4]), []) is None


def test_a_config_without_a_time_there_is_counted_and_not_averaged():
    held_out = robust_regret(contests_of({1024: (100.0, 90.0), 2048: (100.0,)}))
    assert [(left.problem.shape["K"], left.slowdown) for left in held_out.problems] == [
        (1024, 100.0 / 90.0),
        (2048, None),
    ]
    assert (held_out.untimed, held_out.worst_slowdown) == (1, 100.0 / 90.0)


def test_where_nothing_covers_the_others_the_default_is_judged():
    apart = {1024: [evidence(90.0, of=problem(K=1024), config=config(32))]}
    apart[2048] = [evidence(90.0, of=problem(K=2048), config=config(128))]
    default = config(64, stages=2)
    rows = [
        *apart[1024],
        *apart[2048],
        evidence(120.0, of=problem(K=4096), config=default),
        evidence(80.0, of=problem(K=4096), config=config(32)),
    ]
    (left,) = [left for left in robust_regret(all_candidates(rows)).problems if left.problem.shape["K"] == 4096]
    assert (left.config, left.slowdown) == (default, 1.5)


def test_a_problem_not_swept_to_its_end_is_no_judge():
    rows = [evidence(100.0, of=problem(K=K)) for K in (1024, 2048)]
    begun = evidence(100.0, of=problem(K=4096), complete=False)
    assert len(robust_regret(all_candidates([*rows, begun])).problems) == 2


times = st.lists(st.floats(10.0, 1000.0), min_size=3, max_size=3).map(tuple)
measured = st.dictionaries(st.sampled_from([512, 1024, 2048, 4096, 8192]), times, min_size=2)


@given(measured, st.randoms(use_true_random=False))
def test_any_times_give_slowdowns_that_the_others_choice_explains(times_us, generator):
    found = contests_of(times_us)
    held_out = robust_regret(found)
    assert len(held_out.problems) == len(times_us)
    for left in held_out.problems:
        others = [candidates for candidates in found if candidates.problem.shape != left.problem.shape]
        own = times_us[left.problem.shape["K"]]
        chosen = robust(others).config
        assert left.config == chosen
        assert left.slowdown == pytest.approx(own[(32, 64, 128).index(chosen["BLOCK_SIZE"])] / min(own))
    assert 1.0 <= held_out.geomean_slowdown <= held_out.worst_slowdown * (1 + 1e-12)
    assert held_out.geomean_slowdown == pytest.approx(geomean(left.slowdown for left in held_out.problems))
    shuffled = found[:]
    generator.shuffle(shuffled)
    assert set(robust_regret(shuffled).problems) == set(held_out.problems)


def test_a_config_that_is_best_everywhere_loses_nothing():
    held_out = robust_regret(contests_of(dict.fromkeys((1024, 2048, 4096), (100.0, 110.0, 120.0))))
    assert held_out.geomean_slowdown == held_out.worst_slowdown == 1.0


# The row of the nearest key


def test_each_shape_is_judged_by_the_nearest_row_but_its_own():
    """By hand: 1024 and 2048 are nearest to each other, and 4096 to 2048."""
    rows = [keyed(1024, 32), keyed(2048, 64), keyed(4096, 128)]
    near = leave_one_shape_out(contests_of(THREE), rows).nearest
    found = {left.problem.shape["K"]: (left.config, left.slowdown) for left in near.problems}
    assert found == {1024: (config(64), 1.03), 2048: (config(32), 1.02), 4096: (config(64), 1.1)}


def test_a_device_is_judged_by_its_own_nearest_rows_and_no_other_devices():
    found = all_candidates(
        [
            evidence(time_us, of=problem(K=K), config=config(block), device=device)
            for device in (H100, H200)
            for K in (1024, 2048)
            for block, time_us in ((32, 100.0), (64, 110.0), (128, 120.0))
        ]
    )
    own, others = found[:2], found[2:]
    rows = [keyed(1024, 32), keyed(1024, 64, H200.name), keyed(2048, 32), keyed(2048, 128, H200.name)]
    held_out = leave_one_shape_out(own, rows, others)
    assert [left.slowdown for left in held_out.nearest.problems] == [1.0, 1.2, 1.0, 1.1]
    assert [left.slowdown for left in held_out.robust.problems] == [1.0] * 4


def test_without_a_key_to_compare_the_row_for_any_shape_is_judged():
    held_out = leave_one_shape_out(contests_of(THREE), [])
    assert held_out.nearest == held_out.robust


def test_held_out_losses_are_judged_by_the_rule_of_lookups(monkeypatch):
    """A tile of 64 holds what is reduced over up to 64 groups, and is no answer for 256; 32 read twice all along."""
    monkeypatch.setitem(heldout.SPANS, "colwise", Span("BLOCK_SIZE", "G"))
    of = {G: replace(problem(), shape=NamedInts(problem().shape, G=G)) for G in (16, 64, 256)}
    rows = [
        evidence(time_us, of=one, config=config(block))
        for one in of.values()
        for block, time_us in ((8, 110.0), (64, 100.0))
    ]
    table = [
        ("colwise", "", tuple(sorted(key_of(one).items())), tuple(config(8 if G == 16 else 64).items()))
        for G, one in of.items()
    ]
    near = leave_one_shape_out(all_candidates(rows), table).nearest
    assert {left.problem.shape["G"]: left.config for left in near.problems} == {
        16: config(64),
        64: config(8),
        256: config(8),
    }


# Which loses less


def losses(*slowdowns: float | None) -> Regret:
    return Regret(tuple(LeftOut(problem(K=1024 + place), config(), lost) for place, lost in enumerate(slowdowns)))


@pytest.mark.parametrize(
    ("robust_losses", "nearest_losses", "takes_nearest"),
    [
        pytest.param((1.1, 1.1), (1.0, 1.2), True, id="less in the geometric mean"),
        pytest.param((1.0, 1.2), (1.1, 1.1), False, id="more"),
        pytest.param((1.0, 1.2), (1.2, 1.0), False, id="the same"),
        pytest.param((1.5, 1.5), (1.0, None), False, id="does not run where the other does"),
        pytest.param((1.5, None), (1.4, 1.9), True, id="runs where the other does not"),
        pytest.param((1.5, None), (1.4, None), True, id="both do not run"),
        pytest.param((None,), (1.0,), False, id="nothing to compare"),
    ],
)
def test_the_nearest_is_taken_where_it_loses_less(robust_losses, nearest_losses, takes_nearest):
    assert nearest_loses_less([HeldOut(losses(*robust_losses), losses(*nearest_losses))]) is takes_nearest


@pytest.mark.parametrize(
    ("gains", "changes"),
    [
        ((1.03,), False),  # one problem proves nothing
        ((1.03, 1.00), False),
        ((1.03, 1.00, 1.00, 1.00, 1.00), False),
        ((1.012, 1.013, 1.012, 1.013), False),  # less than the keep band
        ((1.03, 1.035, 1.03, 1.03, 1.04), True),
        ((1.4, 1.0, 1.2, 1.0, 1.1, 1.0, 1.3, 1.2), True),
    ],
)
def test_the_committed_rule_stays_until_the_other_is_proven_to_lose_less(gains, changes):
    flat = losses(*[1.0] * len(gains))
    near_is_better, robust_is_better = [HeldOut(losses(*gains), flat)], [HeldOut(flat, losses(*gains))]
    assert nearest_loses_less(near_is_better)
    assert nearest_loses_less(near_is_better, incumbent=True)
    assert nearest_loses_less(near_is_better, incumbent=False) is changes
    assert not nearest_loses_less(robust_is_better)
    assert not nearest_loses_less(robust_is_better, incumbent=False)
    assert nearest_loses_less(robust_is_better, incumbent=True) is not changes


def test_the_nearest_needs_a_time_wherever_the_other_has_one_incumbent_or_not():
    held_out = [HeldOut(losses(1.2, 1.2), losses(1.0, None))]
    assert not any(nearest_loses_less(held_out, incumbent) for incumbent in (None, False, True))


def test_all_devices_of_an_arch_go_by_one_rule():
    one, other = HeldOut(losses(1.2), losses(1.0)), HeldOut(losses(1.0), losses(1.1))
    assert [nearest_loses_less(found) for found in ([one], [other], [one, other], [])] == [True, False, True, False]
