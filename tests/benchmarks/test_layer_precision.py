"""The rule of ``precision="auto"`` and the times that it was fitted to."""

from __future__ import annotations

import pytest

from benchmarks.layer_precision import CSV, cases, decided, fitted
from fp8tune_kernels.gemm.precision import LAYER, PRODUCT

SHIPPED = {"layer": LAYER["sm_90"], "grouped": PRODUCT["sm_90"]}


@pytest.mark.parametrize("op", SHIPPED)
def test_the_shipped_rule_is_the_fitted_one_and_loses_little_on_other_layers(op: str) -> None:
    steps, shipped = cases(CSV, op), SHIPPED[op]
    rule = fitted(steps[steps["set"] == "fit"])
    assert rule.launch_us == pytest.approx(shipped.launch_us, rel=0.01, abs=0.01)
    for costs, expected in ((rule.bf16, shipped.bf16), (rule.saved, shipped.saved)):
        assert [*costs] == pytest.approx([*expected], rel=0.01, abs=0.01)
    held_back = decided(shipped, steps[steps["set"] == "held-back"])
    assert len(held_back) >= 20
    assert held_back["kept"].min() >= 0.96
