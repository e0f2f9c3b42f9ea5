import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.stats.means import geomean, median, trimmed_mean

TIMES_US = st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=60)


def test_block_value_averages_the_middle_half():
    assert trimmed_mean([100.0, 1.0, 2.0, 4.0]) == 3.0
    assert trimmed_mean([9.0, 1.0, 5.0, 5.0, 5.0, 5.0, 1.0, 9.0]) == 5.0


def test_block_value_ignores_outliers_that_a_mean_would_follow():
    assert trimmed_mean([10.0] * 98 + [5_000.0, 90_000.0]) == 10.0


@given(TIMES_US)
def test_block_value_lies_within_its_samples_and_ignores_their_order(samples):
    value = trimmed_mean(samples)
    assert min(samples) * (1 - 1e-12) <= value <= max(samples) * (1 + 1e-12)
    assert value == pytest.approx(trimmed_mean(samples[::-1]), rel=1e-12)


def test_median_of_an_even_count_is_the_mean_of_the_two_middle_ones():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


@given(TIMES_US)
def test_geomean_of_ratios_and_of_their_inverses_cancel(ratios):
    assert geomean(ratios) * geomean([1 / ratio for ratio in ratios]) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("function", [trimmed_mean, median, geomean])
@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, math.inf], [-math.inf]])
def test_nothing_and_non_finite_values_are_refused(function, values):
    with pytest.raises(ValueError, match=r"no values|not a finite number"):
        function(values)


def test_geomean_refuses_what_is_not_positive():
    with pytest.raises(ValueError, match="positive"):
        geomean([1.0, 0.0])
