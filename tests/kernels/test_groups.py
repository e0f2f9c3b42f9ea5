import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune_kernels.groups import ALIGNMENT, group_ends
from fp8tune_kernels.spec import ROUTINGS


@given(st.integers(0, 200_000), st.integers(1, 300), st.integers(0, 2**32))
def test_each_layout_is_what_its_name_says(M: int, G: int, seed: int) -> None:
    ends = {routing: group_ends(routing, M, G, seed) for routing in ROUTINGS}
    for routing, result in ends.items():
        assert len(result) == G
        assert result[-1] == (M - M // 8 if routing == "empty" else M)
        assert result == sorted(result)
        assert result[0] >= 0
    sizes = {
        routing: [end - start for start, end in itertools.pairwise([0, *result])] for routing, result in ends.items()
    }
    assert max(sizes["balanced"]) - min(sizes["balanced"]) <= 1
    assert all(end % ALIGNMENT == 0 for end in ends["jagged"][:-1])
    assert all(end % 2 == 1 for end in ends["ragged"][:-1] if M)
    assert max(sizes["one-giant"]) >= M * 15 / 16
    assert sizes["empty"].count(0) >= G // 2
    if M >= 1000 and 2 <= G <= 50:
        zipf = sorted(sizes["zipf"], reverse=True)
        assert all(abs(size - zipf[0] / rank) <= 2 for rank, size in enumerate(zipf, 1))


@pytest.mark.parametrize(
    ("routing", "M", "G", "named"), [("even", 5, 1, "routing"), ("zipf", -1, 1, "M=-1"), ("zipf", 5, 0, "G=0")]
)
def test_what_is_no_layout_is_refused(routing: str, M: int, G: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        group_ends(routing, M, G)
