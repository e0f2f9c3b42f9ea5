"""The rule of ``precision="auto"`` and the times that it was fitted to."""

from __future__ import annotations

import math

import pytest

from benchmarks.layer_precision import CSV, cases, fitted, least_kept, read
from fp8tune_kernels.gemm.precision import LAYER, PRODUCT, Rule

SHIPPED = {"layer": LAYER["sm_90"], "grouped": PRODUCT["sm_90"]}


def figures(rule: Rule) -> tuple[float, ...]:
    return *rule.bf16, *rule.saved, rule.launch_us


@pytest.mark.parametrize("op", SHIPPED)
def test_the_shipped_rule_is_the_fitted_one(op: str) -> None:
    rule = fitted([case for case in cases(read(CSV), op) if case.set == "fit"])
    for shipped, results in zip(figures(SHIPPED[op]), figures(rule), strict=True):
        assert math.isclose(shipped, results, rel_tol=0.01, abs_tol=0.01)


@pytest.mark.parametrize("op", SHIPPED)
def test_decisions_on_layers_it_was_not_fitted_to_lose_little(op: str) -> None:
    held_back = [case for case in cases(read(CSV), op) if case.set == "held-back"]
    assert len(held_back) >= 20
    assert least_kept(SHIPPED[op], held_back)[0] >= 0.96
