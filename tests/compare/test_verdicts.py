"""Statistics of a comparison, against those of SciPy and against their own promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fp8tune.comparing import verdicts
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.stats.estimate import Estimate

logs = st.lists(st.floats(-0.1, 0.1), min_size=3, max_size=6)
many_logs = st.lists(st.floats(-0.1, 0.1), min_size=7, max_size=40)


@given(logs)
def test_a_paired_effect_is_students(values: list[float]) -> None:
    effect = verdicts.paired(values)
    assert effect.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert effect.error == pytest.approx(stats.sem(values), abs=1e-12)
    if effect.error > 1e-6:
        bound = stats.ttest_1samp(values, 0).confidence_interval(0.9).high
        assert effect.upper(0.05) == pytest.approx(bound, abs=1e-9)


@given(many_logs)
def test_from_seven_rounds_on_it_is_trimmed(values: list[float]) -> None:
    effect = verdicts.paired(values)
    rest = len(values) - 2 * int(0.15 * len(values))
    winsorized = stats.mstats.winsorize(np.array(values), limits=(0.15, 0.15))
    assert effect.df == rest - 1
    assert effect.mean == pytest.approx(stats.trim_mean(values, 0.15), abs=1e-12)
    squares = np.var(winsorized) * len(values)
    assert effect.error == pytest.approx(math.sqrt(squares / (rest * (rest - 1))), abs=1e-12)


def test_two_stalled_rounds_decide_nothing() -> None:
    """On an H100 two rows that were 2 % slower ended OPEN, with intervals of +-3 and +-6 %."""
    rounds = [math.log(1.02) + 0.001 * (-1) ** number for number in range(verdicts.STAGE_TWO_ROUNDS)]
    for stall in (0.7, -0.7):
        assert verdicts.decide(verdicts.paired([*rounds[2:], stall, stall])) is ChangeVerdict.REGRESSION


@pytest.mark.parametrize("count", [4, 25])
def test_an_unpaired_effect_is_welchs_and_yuens(count: int) -> None:
    random = np.random.default_rng(count)
    before, after = random.normal(100, 0.5, count), random.normal(104, 1, count - 1)
    effect = verdicts.unpaired(list(before), list(after))
    theirs = stats.ttest_ind(np.log(after), np.log(before), equal_var=False, trim=0.15)
    assert effect.mean / effect.error == pytest.approx(theirs.statistic)
    assert effect.df == pytest.approx(theirs.df)


def test_each_verdict() -> None:
    assert verdicts.decide(Estimate(math.log(1.02), 0.001, 11)) is ChangeVerdict.REGRESSION
    assert verdicts.decide(Estimate(-math.log(1.02), 0.001, 11)) is ChangeVerdict.FASTER
    assert verdicts.decide(Estimate(0.0, 0.001, 4)) is ChangeVerdict.CLEAR
    assert verdicts.decide(Estimate(0.0, 0.02, 4)) is ChangeVerdict.OPEN
    assert verdicts.decide(Estimate(math.log(1.004), 0.0, 4)) is ChangeVerdict.CLEAR
    assert verdicts.decide(Estimate(math.log(1.013), 0.003, 11), tested=1) is ChangeVerdict.REGRESSION
    assert verdicts.decide(Estimate(math.log(1.013), 0.003, 11), tested=20) is not ChangeVerdict.REGRESSION


@given(st.floats(-0.05, 0.05), st.floats(0, 0.03), st.integers(1, 30))
def test_no_row_is_faster_and_slower_and_what_is_not_open_is_clear(mean: float, error: float, tested: int) -> None:
    effect = Estimate(mean, error, 4)
    assert verdicts.is_open(effect) or verdicts.decide(effect) is ChangeVerdict.CLEAR
    mirrored = {
        ChangeVerdict.REGRESSION: ChangeVerdict.FASTER,
        ChangeVerdict.FASTER: ChangeVerdict.REGRESSION,
    }
    verdict = verdicts.decide(effect, tested)
    if verdict in mirrored:
        assert verdicts.decide(Estimate(-mean, error, 4), tested) is mirrored[verdict]


def test_the_smallest_detectable_effect_is_found_as_often_as_promised() -> None:
    random, sd, rounds, tested = np.random.default_rng(5), 0.008, 12, 3
    error = sd / math.sqrt(rounds)
    true = math.log(verdicts.smallest_detectable(Estimate(0.0, error, rounds - 1), tested))
    detected = sum(
        verdicts.decide(verdicts.paired(list(true + sd * random.standard_normal(rounds))), tested)
        is ChangeVerdict.REGRESSION
        for _ in range(1000)
    )
    # the formula takes the error for known, as any power does
    assert stats.binomtest(detected, 1000, verdicts.POWER).pvalue > 1e-4


def test_a_control_is_loud_only_outside_half_a_percent_and_beyond_chance() -> None:
    assert verdicts.is_stable(Estimate(0.004, 0.0001, 4))
    assert verdicts.is_stable(Estimate(0.01, 0.01, 4))
    assert not verdicts.is_stable(Estimate(0.01, 0.001, 4))
    assert not verdicts.is_stable(Estimate(-0.01, 0.001, 4))


def test_the_geometric_mean_is_over_rows_and_its_error_over_rounds() -> None:
    """Rows that move together (here: are the same) say no more than one of them."""
    changes = [0.01, 0.02, 0.0, 0.015, 0.005]
    single, many = verdicts.geomean([[changes]]), verdicts.geomean([[changes] * 4])
    assert (many.mean, many.error, many.df) == pytest.approx((single.mean, single.error, single.df))
    both = verdicts.geomean([[changes] * 3, [[0.05, 0.05, 0.05]]])
    assert both.mean == pytest.approx((3 * 0.01 + 0.05) / 4)
    assert both.error == pytest.approx(0.75 * single.error)


def test_a_control_arm_that_moves_widens_the_interval_of_all_rows() -> None:
    """Five rounds say that the change is 1 % +- 0.02 %, and that the same code moved by 1 %, too."""
    changes = [0.0101, 0.0099, 0.01, 0.0102, 0.0098]
    single, widened = verdicts.geomean([[changes]]), verdicts.all_rows([[changes]], [[changes]])
    assert widened.mean == single.mean
    assert single.lower(0.025) > 0 > widened.lower(0.025)
    assert widened.df == pytest.approx(1, abs=0.01)
