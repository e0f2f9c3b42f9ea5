"""What follows from the times of `fp8tune bench --op`: speedups, bounds, and means over rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grouped_rows import FAST, ONCE, timed

from fp8tune.bench.cells import Timing
from fp8tune.bench.grouped import means
from fp8tune.bench.operation import (
    BF16,
    BF16_OF_TORCH,
    BOTH,
    FORWARD,
    FP8,
    FP8_OF_TORCH,
    QUANTIZED,
    TORCHAO,
    gemm_of,
)
from fp8tune.bench.operation_fp8 import FP8_ONCE


def test_speedup_bound_and_share_of_the_bound() -> None:
    row = timed(FAST)
    assert (row.speedup(FORWARD), row.speedup(BOTH)) == (pytest.approx(1.25), pytest.approx(1.5))
    assert row.gemms_us == pytest.approx(30.0)
    assert row.bound == pytest.approx(6.0)
    assert row.bound_share == pytest.approx(1.5 / 6.0)
    assert row.rest_us == pytest.approx(120.0 - 80.0)
    assert row.speedup(BOTH, TORCHAO) is None


def test_the_bound_has_the_faster_gemm_of_each_pass_and_the_rest_ours() -> None:
    row = timed(FAST)
    faster = {gemm_of("GEMM grad_B", FP8_OF_TORCH): Timing(4.0), gemm_of("GEMM out", BF16_OF_TORCH): Timing(1.0)}
    row = replace(row, parts={**row.parts, **faster})
    assert row.gemms_us == pytest.approx(10.0 + 10.0 + 4.0)
    assert row.rest_us == pytest.approx(120.0 - 80.0)
    assert row.gemm_speedup("GEMM grad_B") == pytest.approx(0.4)
    assert row.gemm_speedup("GEMM out") == pytest.approx(2.0)
    assert row.gemm_speedup("GEMM out", BF16_OF_TORCH) == pytest.approx(0.1)


def test_what_was_not_timed_enters_nothing() -> None:
    row = timed({**FAST, (FP8, BOTH): None})
    assert (row.speedup(BOTH), row.bound_share, row.rest_us) == (None, None, None)
    assert row.bound == pytest.approx(6.0)
    assert timed(FAST, others_us=None).gemms_us == pytest.approx(30.0)
    row = timed(FAST, part_us=None, others_us=None)
    assert (row.gemms_us, row.bound, row.rest_us) == (None, None, None)


def test_weights_once_are_the_step_and_a_quarter_of_quantizing_them() -> None:
    row = timed({**FAST, **ONCE})
    assert row.time_us(FP8_ONCE, BOTH) == pytest.approx(90.0 + 40.0 / 4)
    assert row.speedup(BOTH, FP8_ONCE) == pytest.approx(1.8)
    assert row.time_us(FP8_ONCE, QUANTIZED) == 90.0
    for lacks in ONCE:
        assert timed({**FAST, **ONCE, lacks: None}).time_us(FP8_ONCE, BOTH) is None
    wrong = {**row.steps, (FP8_ONCE, QUANTIZED): Timing(90.0, "wrong: planted")}
    row = replace(row, steps=wrong)
    assert (row.time_us(FP8_ONCE, BOTH), row.ours_are_wrong) == (None, True)


def test_whose_wrong_result_is_ours() -> None:
    for who, is_ours in ((FP8, True), (FP8_ONCE, True), (TORCHAO, False), (BF16, False)):
        row = timed({**FAST, (who, BOTH): 20.0})
        steps = {step: replace(timing, reason="wrong" if step[0] == who else "") for step, timing in row.steps.items()}
        assert replace(row, steps=steps).ours_are_wrong == is_ours


def test_means_are_geometric_over_the_rows_that_have_the_ratio_and_name_the_worst() -> None:
    slow = timed({**FAST, (BF16, BOTH): 60.0}, others_us=5.0, label="slow")
    fast = timed({**FAST, (BF16, BOTH): 240.0, **ONCE}, others_us=80.0, label="fast")
    found = means([fast, slow])
    step = found["fp8 over bf16"]
    assert (step.geomean, step.worst, step.worst_row.problem.label) == (pytest.approx(1.0), 0.5, "slow")
    assert (step.rows, found["fp8, weights once over bf16"].rows) == (2, 1)
    assert found["fp8, weights once over bf16"].worst == pytest.approx(2.4)
    assert found["GEMM grad_B over fp8, torch's"].geomean == pytest.approx(2.0)
    assert not {"torchao over bf16", "auto over bf16"} & set(found)
    assert means([]) == {}
