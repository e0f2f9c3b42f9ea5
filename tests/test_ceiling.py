"""Shares of the roofline, wherever they are printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.ceiling import CACHED_RATE, Bound, CeilingShare, ceiling_gb_per_s, ceiling_share, gb_per_s, is_cached

rates = st.floats(1e-3, 1e5)


def test_a_rate_is_bytes_over_time() -> None:
    assert gb_per_s(3_000_000, 2.0) == 1500.0


@given(rates, st.lists(rates))
def test_no_share_passes_1_unless_it_comes_from_a_cache(copy: float, kernels: list[float]) -> None:
    ceiling = ceiling_gb_per_s(copy, kernels)
    assert copy <= ceiling <= CACHED_RATE * copy
    assert all(rate <= ceiling or is_cached(rate, copy) for rate in kernels)
    assert ceiling in (copy, *kernels)


@given(rates, rates, st.integers(1, 10**12), st.integers(1, 10**15), st.floats(1.0, 1e16))
def test_the_share_is_of_the_higher_bound(time_us: float, ceiling: float, moved: int, flops: int, peak: float) -> None:
    result = ceiling_share(time_us, moved, ceiling, flops, peak)
    memory_us, compute_us = moved / ceiling / 1e3, 1e6 * flops / peak
    assert result is not None
    assert result.share == pytest.approx(max(memory_us, compute_us) / time_us)
    assert result.bound == ("memory" if result.share == gb_per_s(moved, time_us) / ceiling else "compute")


@given(rates, rates, st.integers(1, 10**12))
def test_bytes_that_may_not_be_moved_give_no_share_above_1(time_us: float, ceiling: float, most: int) -> None:
    result = ceiling_share(time_us, most, ceiling, at_most=True)
    rate = gb_per_s(most, time_us)
    assert (result is None) is is_cached(rate, ceiling)
    assert result is None or result == CeilingShare(min(rate / ceiling, 1.0), Bound.MEMORY)


def test_what_is_not_known_bounds_nothing() -> None:
    assert ceiling_share(None, 1, 1.0, 1, 1.0) is None
    assert ceiling_share(1.0, None, 1.0, 1, None) is None
    assert ceiling_share(1.0, 3_000, 3.0) == ceiling_share(1.0, 3_000, 3.0, 1) == CeilingShare(1.0, Bound.MEMORY)
    assert ceiling_share(2.0, 3_000, None, 1_000_000, 1e12) == CeilingShare(0.5, Bound.COMPUTE)
