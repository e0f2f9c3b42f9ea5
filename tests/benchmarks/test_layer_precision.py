"""The times that the rule of ``precision="auto"`` was fitted to, and the script that measures and fits them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import layer_precision
from benchmarks.layer_precision import CSV, cases, fitted, least_kept, read
from fp8tune_kernels.gemm.precision import LAYER, PRODUCT, Rule

SHIPPED = {"layer": LAYER["sm_90"], "grouped": PRODUCT["sm_90"]}


@pytest.mark.usefixtures("quantizers_in_plain_torch")
def test_every_contender_runs_and_nothing_is_timed_without_a_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert layer_precision.main(["measure", "--layers", "tiny", "--quick"]) == 0
    assert (tmp_path / layer_precision.FILE).exists() == (device == "cuda")


@pytest.mark.parametrize("op", SHIPPED)
def test_the_shipped_rule_is_the_fitted_one(op: str) -> None:
    rule = fitted([case for case in cases(read(CSV), op) if case.set == "fit"])
    for shipped, found in zip(figures(SHIPPED[op]), figures(rule), strict=True):
        assert math.isclose(shipped, found, rel_tol=0.01, abs_tol=0.01)


def figures(rule: Rule) -> tuple[float, ...]:
    return *rule.bf16, *rule.saved, rule.launch_us


@pytest.mark.parametrize("op", SHIPPED)
def test_decisions_on_layers_it_was_not_fitted_to_lose_little(op: str) -> None:
    held_back = [case for case in cases(read(CSV), op) if case.set == "held-back"]
    assert len(held_back) >= 20
    share, _, _ = least_kept(SHIPPED[op], held_back)
    assert share >= 0.96
