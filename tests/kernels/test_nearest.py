import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp8tune_kernels import catalog
from fp8tune_kernels.runtime.chain import Step, distance, nearest, taken
from fp8tune_kernels.spec import DTYPE_FLAG, FLAGS, LAYOUT_FLAG, Span
from fp8tune_kernels.tables import Key, Row, Table


def key(**sizes: int) -> Key:
    return tuple(sorted(sizes.items()))


def row(of: Key | None, device: str = "", warps: int = 4) -> Row:
    return "colwise", device, of, (("num_warps", warps),)


@pytest.mark.parametrize(
    ("first", "second", "far"),
    [
        pytest.param(key(G=4, K=2048), key(G=4, K=2048), 0.0, id="the same"),
        pytest.param(key(G=4, K=2048), key(G=4, K=8192), 4.0, id="two doublings"),
        pytest.param(key(G=4, K=2048), key(G=8, K=1024), 2.0, id="a doubling and a halving"),
        pytest.param(key(K=5120), key(K=7168), math.log2(1.4) ** 2, id="no power of two"),
        pytest.param(key(G=0), key(G=1), 1.0, id="0 before 1 as 1 before 2"),
        pytest.param(key(G=4, M_bucket=4096), key(G=8, M_bucket=8192), 2.0, id="more groups of as many rows"),
        pytest.param(key(G=2, M_bucket=8192), key(G=4, M_bucket=4096), 6.0, id="fewer rows in more groups"),
        pytest.param(key(K=64, **{LAYOUT_FLAG: 1}), key(K=64, **{LAYOUT_FLAG: 1}), 0.0, id="one layout"),
        pytest.param(key(K=64, **{LAYOUT_FLAG: 1}), key(K=64, **{LAYOUT_FLAG: 0}), math.inf, id="two layouts"),
        pytest.param(key(K=64), key(N=64), math.inf, id="other names"),
    ],
)
def test_distance_is_of_ratios(first: Key, second: Key, far: float) -> None:
    assert distance(first, second) == distance(second, first) == pytest.approx(far)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        pytest.param([row(key(K=2560)), row(key(K=10240))], 0, id="as far: the key that sorts first"),
        pytest.param([row(key(K=2560)), row(key(K=10240), "H200")], 1, id="as far: the device"),
        pytest.param([row(key(K=4096)), row(key(K=10240), "H200")], 0, id="nearer than the device's"),
        pytest.param([row(None), row(key(K=1 << 40))], 1, id="however far"),
    ],
)
def test_the_least_far_then_the_device_then_the_order_of_keys(rows: list[Row], found: int) -> None:
    assert nearest(key(K=5120), rows) == nearest(key(K=5120), rows[::-1]) == rows[found]


SPAN = Span("BLOCK_SIZE_ITER", "K")


def tile(of: Key, columns: int) -> Row:
    return "rowwise-2d", "", of, (("BLOCK_SIZE_ITER", columns),)


@pytest.mark.parametrize(
    ("wanted", "rows", "found"),
    [
        pytest.param(14336, [tile(key(K=8192), 8192), tile(key(K=5120), 1024)], 1, id="the next that suits"),
        pytest.param(14336, [tile(key(K=8192), 4096), tile(key(K=5120), 1024)], 0, id="it read twice where measured"),
        pytest.param(7168, [tile(key(K=8192), 8192), tile(key(K=5120), 1024)], 0, id="it reads once here, too"),
        pytest.param(4096, [tile(key(K=8192), 4096), tile(key(K=1024), 1024)], 0, id="it reads once here, not there"),
        pytest.param(8193, [tile(key(K=8192), 8192)], None, id="none suits"),
        pytest.param(8193, [("rowwise-2d", "", key(K=8192), ())], None, id="an axis left out has the default's value"),
    ],
)
def test_a_row_in_one_piece_is_not_taken_for_a_longer_row(wanted: int, rows: list[Row], found: int | None) -> None:
    """Sizes as ``rowwise-2d`` has them: on an H200 the row of 8192 lost 28 % at 14336."""
    taken = nearest(key(K=wanted), rows, SPAN, {"BLOCK_SIZE_ITER": 8192})
    assert taken == (None if found is None else rows[found])


IN_REGISTERS = Span(None, "N", values_a_thread=64)


@pytest.mark.parametrize(
    ("wanted", "warps", "measured", "suits"),
    [
        (14336, 4, 8192, False),
        (14336, 8, 8192, True),
        (8192, 4, 2048, True),
        (8193, 4, 2048, False),
        (14336, 4, 14336, True),  # what was measured is the key's own
        (1408, 4, 14336, True),
        (14336, 4, None, False),  # the fallback row
        (14336, 8, None, True),
    ],
)
def test_no_thread_has_more_of_a_longer_row_in_registers(
    wanted: int, warps: int, measured: int | None, suits: bool
) -> None:
    """The gradient of 14,336 columns took 779 us on an H200 with the config of shorter rows."""
    config = {"num_warps": warps}
    assert IN_REGISTERS.suits(config, {} if measured is None else {"N": measured}, {"N": wanted}) == suits


@pytest.mark.parametrize(("columns", "step"), [(8192, Step.FALLBACK), (14336, Step.DEFAULT)])
def test_a_fallback_row_that_does_not_suit_gives_way_to_the_default(columns: int, step: Step) -> None:
    spec = catalog.load("swiglu-gradient")
    fallback: Row = (spec.name, "", None, (("BLOCK_SIZE_M", 16), ("TILE", 2048), ("num_warps", 4), ("num_stages", 3)))
    wanted = {"M_bucket": 8192, "N": columns, "G": 8, DTYPE_FLAG: 3}
    assert taken(spec, wanted, Table((fallback,)), "")[0] == step


sizes = st.one_of(st.integers(0, 8), st.integers(0, 2**63 - 1))
keys = st.builds(key, G=sizes, K=sizes, M_bucket=sizes)
rows = st.lists(st.builds(row, keys, st.sampled_from(["", "H200"]), st.sampled_from([2, 4, 8])), min_size=1, max_size=8)


@given(rows)
@example([row(key(G=1, K=2**62, M_bucket=1)), row(key(G=1, K=2**62 + 1, M_bucket=1))])  # their ratio rounds to 1
def test_a_key_that_has_a_row_is_its_own_nearest(rows: list[Row]) -> None:
    for one in rows:
        assert one[2] is not None
        found = nearest(one[2], rows)
        assert found is not None
        assert found[2] == one[2]


@given(keys, rows, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter_and_none_is_nearer(
    wanted: Key, rows: list[Row], generator: random.Random
) -> None:
    found = nearest(wanted, rows)
    assert nearest(wanted, generator.sample(rows, len(rows))) == found
    assert found is not None
    assert found[2] is not None
    far = distance(wanted, found[2])
    assert all(far <= distance(wanted, other) for _, _, other, _ in rows if other is not None)


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_no_key_is_near_one_with_another_flag(flag: str) -> None:
    assert {LAYOUT_FLAG, DTYPE_FLAG} == FLAGS
    rows = [row(key(K=64, **{flag: 1})), row(key(K=8192, **{flag: 2}))]
    assert nearest(key(K=64, **{flag: 2}), rows) == rows[1]
    assert nearest(key(K=64, **{flag: 0}), rows) is None
