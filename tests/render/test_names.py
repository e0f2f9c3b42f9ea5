"""Names as tables print them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fp8tune.render.terminal import LONGEST_NAME, kernel_name, lookup_key


@given(st.text(max_size=100))
def test_a_long_name_keeps_its_end(name: str) -> None:
    shown = kernel_name(name)
    assert len(shown) <= LONGEST_NAME
    assert shown == name or (shown.startswith("...") and name.endswith(shown[3:]))


def test_a_module_is_cut_before_its_kernel() -> None:
    name = "torchao.prototype.moe_training.kernels.jagged_float8_scales:_colwise_kernel"
    assert kernel_name(name) == "....jagged_float8_scales:_colwise_kernel"
    assert len(kernel_name(name)) == LONGEST_NAME


def test_a_key_names_its_dtype() -> None:
    assert lookup_key({"K": 4096, "in_dtype": 1}) == "K=4096 in_dtype=float16"
    assert lookup_key({"in_dtype": 99}) == "in_dtype=99"
