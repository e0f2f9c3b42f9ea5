"""What "of ceiling" is a share of, wherever it is printed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fp8tune.ceiling import CACHED_SHARE, ceiling_gb_per_s, gb_per_s, is_cached

rates = st.floats(1e-3, 1e5)


def test_a_rate_is_bytes_over_time() -> None:
    assert gb_per_s(3_000_000, 2.0) == 1500.0


@given(rates, st.lists(rates))
def test_no_share_passes_1_unless_it_comes_from_a_cache(copy: float, kernels: list[float]) -> None:
    ceiling = ceiling_gb_per_s(copy, kernels)
    assert copy <= ceiling <= CACHED_SHARE * copy
    assert all(rate <= ceiling or is_cached(rate, copy) for rate in kernels)
    assert ceiling in (copy, *kernels)
