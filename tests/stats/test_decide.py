"""Finalists, values and decisions on made-up times: what is kept, what is replaced, and what is said of it."""

from __future__ import annotations

import math
import random

import pytest
from database_rows import AXES, config
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fp8tune.records import NamedInts
from fp8tune.stats.decide import MeasuringPlan, decide
from fp8tune.stats.pairs import Block, canonical_order, process_values
from fp8tune.stats.screen import choose_finalists
from fp8tune.stats.study import Decision, Verdict

FIRST, SECOND, THIRD = (config(block) for block in (32, 64, 128))
"""In canonical order."""
CONFIGS = [config(block, warps, stages) for block in (32, 64, 128) for warps in (4, 8) for stages in (1, 2)]


def values(processes: int = 6, spread: float = 0.001, seed: int = 0, **slowdowns: float) -> dict:
    """Log times of FIRST, SECOND and THIRD by slowdown over 100 us, with normal process effects."""
    generator = random.Random(seed)
    configs = {"first": FIRST, "second": SECOND, "third": THIRD}
    return {
        configs[name]: {
            f"p{process:02}": math.log(100) + math.log1p(slowdown) + generator.gauss(0, spread)
            for process in range(processes)
        }
        for name, slowdown in slowdowns.items()
    }


def decided(timed: dict, current: NamedInts | None = None, default: NamedInts | None = None, **others) -> Decision:
    return decide(timed, current=current, default=default, axes=AXES, **others)


# What is picked


def test_the_first_within_the_tie_band_is_picked_and_its_faster_rival_named():
    decision = decided(values(first=0.006, second=0.0, third=0.05))
    assert (decision.pick, decision.verdict, decision.runner_up) == (FIRST, Verdict.PROVEN, SECOND)
    assert decision.ratio == pytest.approx(1 / 1.006, abs=0.002)
    assert decision.lower < 0.006 < decision.upper < 0.015
    assert decision.time_us == pytest.approx(100.6, rel=0.002)
    assert decision.processes == 6


def test_outside_the_tie_band_the_fastest_is_picked():
    decision = decided(values(first=0.013, second=0.0, third=0.05))
    assert (decision.pick, decision.verdict) == (SECOND, Verdict.PROVEN)
    assert decision.upper < 0


def test_the_default_comes_before_all_others_within_the_tie_band():
    assert decided(values(first=0.0, second=0.0, third=0.006), default=THIRD).pick == THIRD
    assert decided(values(first=0.0, second=0.0, third=0.03), default=THIRD).pick == FIRST


def test_nothing_replaces_the_default_that_is_not_proven_faster():
    """Within a tenth of the spread nothing is proven, however far apart the means are."""
    noisy = values(processes=3, spread=0.03, first=0.0, second=0.02, third=0.02)
    decision = decided(noisy, default=THIRD)
    assert (decision.pick, decision.verdict) == (THIRD, Verdict.OPEN)
    assert decision.needs_more


@pytest.mark.parametrize(
    ("slowdown", "pick"), [(0.0, THIRD), (0.008, THIRD), (0.012, THIRD), (0.03, FIRST), (0.1, FIRST)]
)
def test_the_incumbent_stays_until_it_is_proven_slower_by_the_keep_band(slowdown, pick):
    assert decided(values(first=0.0, third=slowdown), current=THIRD, default=SECOND).pick == pick


def test_what_may_lose_more_than_the_keep_band_is_open_and_wants_more_processes():
    decision = decided(values(spread=0.01, first=0.0, third=0.001), current=THIRD)
    assert decision.verdict is Verdict.OPEN
    assert decision.needs_more
    assert not decided(values(processes=24, spread=0.001, first=0.0, third=0.001), current=THIRD).needs_more


def test_a_pick_at_the_edge_of_the_tie_band_wants_more_processes_and_an_incumbent_does_not():
    edge = values(spread=0.003, first=0.0095, second=0.0)
    assert decided(edge).verdict is Verdict.OPEN
    assert decided(edge).needs_more
    assert not decided(edge, current=SECOND).needs_more


def test_one_process_proves_nothing():
    decision = decided(values(processes=1, first=0.0, third=0.5), current=THIRD)
    assert (decision.pick, decision.verdict) == (THIRD, Verdict.OPEN)
    assert (decision.lower, decision.upper) == (-1.0, math.inf)


def test_a_lone_finalist_is_the_pick_and_proven_against_nothing():
    """It was once called certified: proven faster than every other finalist, of which there were none."""
    decision = decided(values(first=0.0), current=FIRST)
    assert (decision.pick, decision.verdict, decision.runner_up) == (FIRST, Verdict.PROVEN, None)
    assert (decision.lower, decision.upper) == (-math.inf, math.inf)


def test_the_bound_is_the_paired_t_of_processes_shared_out_over_rivals_and_looks():
    timed = values(processes=8, first=0.0, second=0.02, third=0.03)
    decision = decided(timed, plan=MeasuringPlan(more_processes=(12, 24)))
    rivals = {
        rival: stats.ttest_rel(list(timed[FIRST].values()), list(timed[rival].values())).confidence_interval(
            1 - 2 * 0.025 / (2 * 3)
        )
        for rival in (SECOND, THIRD)
    }
    assert decision.lower == pytest.approx(math.expm1(rivals[SECOND].low))
    assert decision.upper == pytest.approx(math.expm1(max(bounds.high for bounds in rivals.values())))


def full(configs: list[NamedInts], processes: list[str]) -> dict:
    return {item: dict.fromkeys(processes, 4.6 + place / 50) for place, item in enumerate(configs)}


def test_a_config_that_failed_in_one_process_of_many_is_out():
    timed = full(CONFIGS, list("abcdef"))
    del timed[CONFIGS[0]]["c"]
    assert (decided(timed).pick, decided(timed).processes) == (CONFIGS[1], 6)


def test_a_process_that_was_stopped_half_way_does_not_count():
    timed = full(CONFIGS, list("abcdef"))
    timed[CONFIGS[5]]["g"] = 1.0
    assert (decided(timed).pick, decided(timed).processes) == (CONFIGS[0], 6)


def test_of_two_sweeps_what_both_timed_is_compared_over_all_processes():
    first, second = full(CONFIGS[:10], list("abcdef")), full(CONFIGS[2:], list("ghijkl"))
    both = {item: first.get(item, {}) | second.get(item, {}) for item in CONFIGS}
    assert (decided(both).processes, decided(both).pick in CONFIGS[2:10]) == (12, True)


def test_no_values_are_refused():
    with pytest.raises(ValueError, match="no values"):
        decided({})


def test_a_challenger_rarely_replaces_an_incumbent_as_good_as_the_keep_band_allows():
    """At the edge, 2.5 % of rows may flip over all looks: of 200, more than 16 happen once in ten thousand."""
    edge = MeasuringPlan().keep_band
    flips = sum(
        decided(values(spread=0.003, seed=seed, first=0.0, third=edge), current=THIRD).pick != THIRD
        for seed in range(200)
    )
    assert flips <= 16


times = st.dictionaries(
    st.sampled_from(CONFIGS),
    st.lists(st.floats(4.0, 5.0), min_size=3, max_size=3),
    min_size=1,
)


@given(times, st.randoms(use_true_random=False))
def test_any_order_of_configs_and_processes_gives_the_same_decision(logs, generator):
    timed = {item: {f"p{number}": value for number, value in enumerate(result)} for item, result in logs.items()}
    shuffled = {
        item: dict(generator.sample(list(timed[item].items()), 3)) for item in generator.sample(list(timed), len(timed))
    }
    assert decided(timed, default=CONFIGS[0]) == decided(shuffled, default=CONFIGS[0])


@given(times)
def test_the_bounds_hold_the_measured_ratio(logs):
    decision = decided({item: {f"p{n}": value for n, value in enumerate(result)} for item, result in logs.items()})
    assert decision.pick in logs
    if decision.ratio is not None:
        assert decision.lower <= 1 / decision.ratio - 1 + 1e-9
        assert decision.upper >= 1 / decision.ratio - 1 - 1e-9


# One value a process and config


def blocks(process: str, *rounds: dict[NamedInts, float]) -> list[Block]:
    return [Block(process, number, item, us) for number, result in enumerate(rounds) for item, us in result.items()]


def test_drift_from_round_to_round_cancels():
    drifting = [{FIRST: 100 * drift, SECOND: 110 * drift} for drift in (1.0, 1.5, 0.7, 1.1, 2.0, 0.9)]
    result = process_values(blocks("a", *drifting))
    assert result[SECOND]["a"] - result[FIRST]["a"] == pytest.approx(math.log(1.1))


def test_one_disturbed_round_of_six_is_cut():
    calm = [{FIRST: 100.0, SECOND: 110.0}] * 5
    result = process_values(blocks("a", *calm, {FIRST: 100.0, SECOND: 165.0}))
    assert result[SECOND]["a"] - result[FIRST]["a"] == pytest.approx(math.log(1.1))


def test_a_value_is_the_log_time_of_its_process():
    result = process_values([*blocks("a", {FIRST: 100.0}, {FIRST: 100.0}), *blocks("b", {FIRST: 120.0})])
    assert {name: math.exp(value) for name, value in result[FIRST].items()} == pytest.approx({"a": 100, "b": 120})


def test_a_round_that_was_stopped_does_not_count():
    whole = [{FIRST: 100.0, SECOND: 110.0}] * 4
    assert process_values(blocks("a", *whole, {FIRST: 300.0})) == process_values(blocks("a", *whole))


@given(st.randoms(use_true_random=False))
def test_any_order_of_blocks_gives_the_same_values(generator):
    made = [
        Block(name, number, item, generator.uniform(50, 60)) for name in "ab" for number in range(6) for item in CONFIGS
    ]
    assert process_values(generator.sample(made, len(made))) == process_values(made)


# Finalists


def screened(**slowdowns_us: float) -> dict[NamedInts, list[float]]:
    configs = {"first": FIRST, "second": SECOND, "third": THIRD}
    return {configs[name]: [us, us * 1.01, us * 0.99] for name, us in slowdowns_us.items()}


def test_what_cannot_be_the_best_is_no_finalist_unless_it_must_be():
    times_us = screened(first=100.0, second=103.0, third=110.0)
    assert choose_finalists(times_us, AXES) == (FIRST, SECOND)
    assert choose_finalists(times_us, AXES, always=[THIRD, config(999)]) == (FIRST, SECOND, THIRD)
    assert choose_finalists({}, AXES, always=[THIRD]) == ()


def test_a_noisy_screen_has_a_wider_band():
    generator = random.Random(0)
    noisy = {item: [100 * math.exp(generator.gauss(0, 0.05)) for _ in range(3)] for item in CONFIGS}
    best = min(math.prod(times) for times in noisy.values())
    chosen = choose_finalists(noisy, AXES, plan=MeasuringPlan(finalists=12, screen_error=0.05))
    assert any(math.prod(noisy[item]) > best * 1.04**3 for item in chosen)


def test_of_many_ties_those_that_may_be_picked_are_choose_finalists():
    """The fastest are in, and so are the first in canonical order: one of them is what the tie band picks."""
    generator = random.Random(1)
    ordered = sorted(CONFIGS, key=canonical_order(AXES))
    times_us = {item: [100 * generator.uniform(1.002, 1.006)] * 3 for item in ordered}
    times_us[ordered[-1]] = [100.0] * 3
    chosen = choose_finalists(times_us, AXES, plan=MeasuringPlan(finalists=4))
    assert len(chosen) == 4
    assert {ordered[0], ordered[1], ordered[-1]} <= set(chosen)


def test_a_config_left_out_of_later_rounds_is_compared_by_its_own_rounds():
    """The clock slows down by a tenth after the first round; SECOND was only timed in that."""
    times_us = {FIRST: [100.0, 110.0, 110.0], THIRD: [101.0, 111.1, 111.1], SECOND: [130.0]}
    assert choose_finalists(times_us, AXES) == (FIRST, THIRD)


@given(st.dictionaries(st.sampled_from(CONFIGS), st.lists(st.floats(50, 60), min_size=1, max_size=3), min_size=1))
def test_finalists_are_bounded_timed_and_include_the_fastest_and_the_kept(times_us):
    holder = CONFIGS[:2]
    chosen = choose_finalists(times_us, AXES, holder, MeasuringPlan(finalists=4))
    assert set(holder) & set(times_us) <= set(chosen) <= set(times_us)
    assert 1 <= len(chosen) <= 4
    assert list(chosen) == sorted(chosen, key=canonical_order(AXES))
