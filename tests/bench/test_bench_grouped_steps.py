"""What the arms of `fp8tune bench --op` run, on a CPU: bf16 is torch's grouped GEMM, quantizers are the references."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from grouped_rows import Operation, each_operation, operands, small

from fp8tune.bench import grouped as bench_grouped
from fp8tune.bench import grouped_contenders as grouped_steps
from fp8tune.bench.cells import Timing
from fp8tune.bench.grouped_contenders import PADDING, Step
from fp8tune.bench.operation import (
    BF16,
    BOTH,
    FORWARD,
    FP8_OF_TORCH,
    GEMMS,
    TORCHAO,
    Operands,
    gemm_of,
)
from fp8tune.bench.operation_fp8 import FP8_GROUPED_MM
from fp8tune.measure.backends.choice import backend_for
from fp8tune.records import NamedInts

ROUTINGS = pytest.mark.parametrize("routing", ["balanced", "ragged", "empty"])


@each_operation
@pytest.mark.parametrize(("routing", "needed"), [("balanced", False), ("ragged", True), ("empty", True)])
def test_only_mxfp8_pads_groups_where_one_needs_it(routing: str, needed: bool, operation: Operation) -> None:
    one = small(operation, routing)
    assert grouped_steps.needs_padding(one) == operands(one).pad == needed
    assert grouped_steps.is_padded(one) == (needed and operation.pads)
    padding = PADDING if needed and operation.pads else ()
    assert grouped_steps.parts_of(one) == (*operation.parts, *padding)
    assert set(grouped_steps.timed_parts(one)) == {*operation.all_parts, *padding}


def all_of_ours(operation: Operation) -> list[str]:
    return [name for name in (*operation.contenders, *operation.variants) if name not in (BF16, TORCHAO)]


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@each_operation
@pytest.mark.parametrize("routing", ["balanced", "ragged"])
def test_our_step_is_near_that_of_bf16(routing: str, operation: Operation) -> None:
    given = operands(small(operation, routing))
    for step in (FORWARD, BOTH):
        results = [grouped_steps.step_call(operation, who, step, given)() for who in (BF16, operation.ours)]
        pairs = [results] if step == FORWARD else list(zip(*results, strict=True))
        assert len(pairs) == (1 if step == FORWARD else 2)
        for right, ours in pairs:
            assert ours.shape == right.shape
            assert 0 < (ours.float() - right.float()).norm() < 0.06 * right.float().norm()


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@each_operation
@ROUTINGS
def test_a_variant_and_quantized_weights_give_our_step_to_the_bit(routing: str, operation: Operation) -> None:
    given = operands(small(operation, routing))
    ours = grouped_steps.step_call(operation, operation.ours, BOTH, given)()
    for name in (*operation.variants, *tuple(operation.once)[:1]):
        for result, right in zip(grouped_steps.step_call(operation, name, BOTH, given)(), ours, strict=True):
            assert torch.equal(result, right)


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@each_operation
@ROUTINGS
def test_the_parts_put_together_are_the_step(routing: str, operation: Operation) -> None:
    one = small(operation, routing)
    given = operands(one)
    parts = {part: grouped_steps.part_call(operation, part, given)() for part in grouped_steps.parts_of(one)}
    out, grads = (grouped_steps.step_call(operation, operation.ours, step, given)() for step in (FORWARD, BOTH))
    gemms = [parts[gemm] for gemm in GEMMS]
    assert torch.equal(gemms[2].transpose(1, 2), grads[1])
    if not grouped_steps.is_padded(one):
        assert torch.equal(gemms[0], out)
        assert torch.equal(gemms[1], grads[0])


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("routing", ["balanced", "ragged"])
def test_other_gemms_give_what_ours_give(routing: str) -> None:
    given = operands(small(routing=routing))
    for gemm in GEMMS:
        ours = grouped_steps.part_call(FP8_GROUPED_MM, gemm, given)().float()
        for whose in FP8_GROUPED_MM.other_gemms[gemm]:
            other = grouped_steps.part_call(FP8_GROUPED_MM, gemm_of(gemm, whose), given)().float()
            assert other.shape == ours.shape
            error = (other - ours).norm() / ours.norm()
            assert error < (1e-3 if whose == FP8_OF_TORCH else 0.06)


# Whether a result is right


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@each_operation
@ROUTINGS
def test_right_results_pass(routing: str, operation: Operation) -> None:
    given = operands(small(operation, routing))
    for name in [*all_of_ours(operation), *([BF16] if routing == "balanced" else [])]:
        found = grouped_steps.accuracy_of(operation, name, given)
        assert found.reason == ""
        assert found.sqnr_db is not None
        assert min(found.sqnr_db.values()) > (40 if name == BF16 else 25)


def spoiled(given: Operands) -> Callable[..., torch.Tensor]:
    """bf16 without the last expert."""

    def multiply(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        kept = torch.ones(len(offs), 1, 1, dtype=B_t.dtype)
        kept[-1] = 0
        return torch._grouped_mm(A, B_t * kept, offs=offs)

    return multiply


def test_one_expert_that_is_left_out_is_wrong() -> None:
    operation = replace(FP8_GROUPED_MM, contenders={**FP8_GROUPED_MM.contenders, TORCHAO: spoiled})
    found = grouped_steps.accuracy_of(operation, TORCHAO, operands(small()))
    assert re.fullmatch(r"wrong: \w+ has an SQNR of -?0.0 dB, wanted 20", found.reason)
    checked = Timing(5.0).with_check(found)
    assert (checked.time_us, checked.valid_us) == (5.0, None)


def test_a_contender_is_checked_on_the_operands_that_it_is_timed_on() -> None:
    right = Step(BF16, small(), BOTH)
    right.build("cpu")
    before = torch.get_float32_matmul_precision()
    found = right.check()
    assert torch.get_float32_matmul_precision() == before
    assert found.reason == ""
    assert found.sqnr_db is not None
    assert min(found.sqnr_db.values()) > 40
    assert len(right.launcher("cpu")()) == 2


def test_nan_is_wrong_and_exact_is_not() -> None:
    right = torch.ones(2, 2)
    assert grouped_steps.sqnr_db(right, right) == math.inf
    assert grouped_steps.sqnr_db(right * math.nan, right) == -math.inf
    assert grouped_steps.sqnr_db(right, right * 0) == -math.inf
    assert grouped_steps.sqnr_db(right * 1.1, right) == pytest.approx(20, abs=0.01)


@pytest.mark.gpu
@each_operation
def test_on_a_gpu_every_step_and_part_of_ours_has_a_time(operation: Operation) -> None:
    backend, _ = backend_for(None, None)
    for routing in ("balanced", "empty"):
        one = replace(small(operation, routing), shape=NamedInts(M=1024, N=256, K=512, G=4))
        *_, row = bench_grouped.run(
            backend, (one,), extent=bench_grouped.Extent(with_torchao=False, with_variants=True)
        )
        assert isinstance(row, bench_grouped.Row)
        for found in (*row.steps.values(), *row.parts.values()):
            assert found.time_us, found.reason
            assert not found.reason
        assert all(row.peak_bytes[name] for name in all_of_ours(operation))
        assert operation.name != "grouped-mm" or row.auto in ("fp8", "bf16")
