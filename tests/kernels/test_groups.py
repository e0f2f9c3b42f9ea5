import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune_kernels.groups import ALIGNMENT, group_ends
from fp8tune_kernels.spec import ROUTINGS

rows = st.integers(0, 200_000)
groups = st.integers(1, 300)
seeds = st.integers(0, 2**32)


def sizes(routing: str, M: int, G: int, seed: int) -> list[int]:
    ends = group_ends(routing, M, G, seed)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@given(st.sampled_from(ROUTINGS), rows, groups, seeds)
def test_every_row_is_in_one_group_or_padding(routing: str, M: int, G: int, seed: int) -> None:
    ends = group_ends(routing, M, G, seed)
    assert len(ends) == G
    assert ends[-1] == (M - M // 8 if routing == "empty" else M)
    assert ends == sorted(ends)
    assert ends[0] >= 0


@given(rows, groups, seeds)
def test_balanced_sizes_differ_by_one_at_most(M: int, G: int, seed: int) -> None:
    found = sizes("balanced", M, G, seed)
    assert max(found) - min(found) <= 1


@given(rows, groups, seeds)
def test_jagged_groups_end_on_aligned_rows(M: int, G: int, seed: int) -> None:
    assert all(end % ALIGNMENT == 0 for end in group_ends("jagged", M, G, seed)[:-1])


@given(st.integers(1, 200_000), groups, seeds)
def test_ragged_groups_end_on_odd_rows(M: int, G: int, seed: int) -> None:
    assert all(end % 2 == 1 for end in group_ends("ragged", M, G, seed)[:-1])


@given(rows, groups, seeds)
def test_one_giant_holds_nearly_all_rows(M: int, G: int, seed: int) -> None:
    assert max(sizes("one-giant", M, G, seed)) >= M * 15 / 16


@given(rows, st.integers(2, 300), seeds)
def test_empty_leaves_groups_without_rows(M: int, G: int, seed: int) -> None:
    assert sizes("empty", M, G, seed).count(0) >= G // 2


@given(st.integers(1000, 200_000), st.integers(2, 50), seeds)
def test_zipf_sizes_fall_as_one_over_the_rank(M: int, G: int, seed: int) -> None:
    found = sorted(sizes("zipf", M, G, seed), reverse=True)
    assert all(abs(size - found[0] / rank) <= 2 for rank, size in enumerate(found, 1))


@pytest.mark.parametrize(
    ("routing", "M", "G", "named"), [("even", 5, 1, "routing"), ("zipf", -1, 1, "M=-1"), ("zipf", 5, 0, "G=0")]
)
def test_what_is_no_layout_is_refused(routing: str, M: int, G: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        group_ends(routing, M, G)
