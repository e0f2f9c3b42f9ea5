"""Whether the output of a contender is right, and how wrong it is said to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_fakes import TorchAo
from places import PLANTED

from fp8tune.bench import cells, checking, kernel_contenders
from fp8tune.bench.cells import Timing
from fp8tune.bench.checking import Checked, Part
from fp8tune.bench.kernel_contenders import (
    OURS,
    TORCH_COMPILE,
    TORCHAO,
    KernelContender,
)
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec


@pytest.mark.parametrize("kernel", ["colwise", "rowwise-2d", "mxfp8-dim1"])
def test_a_right_output_passes_the_check(kernel: str, contender: Callable[..., KernelContender]) -> None:
    for name in (OURS, TORCH_COMPILE):
        timing = contender(name, kernel).check()
        assert (timing.reason, timing.time_us) == ("", None)
        assert timing.checked is not None
        assert timing.checked.codes.total
        assert timing.checked.scales.total


def test_a_wrong_output_is_named_with_its_shares(contender: Callable[..., KernelContender], torchao: TorchAo) -> None:
    spec = load_spec("rowwise-2d")

    def wrong(*inputs: Any) -> tuple[Any, ...]:
        codes, scales = spec.reference(*inputs)
        codes[: len(codes) // 2].view(torch.uint8).bitwise_not_()
        scales[0] *= 2
        return codes, scales

    torchao("rowwise-2d", wrong)
    timing = contender(TORCHAO, "rowwise-2d").check()
    assert timing.checked is not None
    assert timing.checked.codes.share == 0.5
    assert timing.checked.scales.wrong == 1
    assert timing.reason.startswith("wrong: 50 % of codes, ")


def test_an_output_that_is_not_written_is_wrong_whatever_memory_held(
    contender: Callable[..., KernelContender], torchao: TorchAo
) -> None:
    kept: list[Any] = []

    def stale(*inputs: Any) -> tuple[Any, ...]:
        """Writes the first time alone, and gives the same memory ever after."""
        if not kept:
            kept.extend(load_spec("colwise-3d").reference(*inputs))
        return tuple(kept)

    torchao("colwise-3d", stale)
    theirs = contender(TORCHAO, "colwise-3d")
    assert theirs.check().reason == ""
    checking.spoil(kept, load_spec("colwise-3d").reference(*load_spec("colwise-3d").inputs(theirs.problem, "cpu")))
    assert "100 % of codes" in theirs.check().reason


def test_what_cannot_be_checked_does_not_count() -> None:
    timed, right = Timing(5.0), Timing(checked=Checked(Part(0, 10), Part(0, 2)))
    assert timed.with_check(right).valid_us == 5.0
    unchecked = timed.with_check(Timing(reason="OutOfMemoryError: planted"))
    assert (unchecked.time_us, unchecked.valid_us) == (5.0, None)
    assert unchecked.reason == "not checked: OutOfMemoryError: planted"
    assert timed.with_check(Timing()) == timed  # a clock that runs no kernels
    assert Timing(reason="no such GPU").with_check(right).reason == "no such GPU"


def test_outputs_are_compared_by_bits() -> None:
    codes, scales = torch.tensor([1.0, -0.0]).to(torch.float8_e4m3fn), torch.tensor([1.0, float("nan")])
    assert checking.compared((codes, scales), (codes.clone(), scales.clone())).wrong == ""  # any NaN is any NaN
    assert checking.compared((codes.abs(), scales), (codes, scales)).codes == Part(1, 2)  # -0 is not 0
    e8m0 = torch.tensor([120, 255], dtype=torch.uint8)
    assert checking.compared((e8m0,), (e8m0.view(torch.float8_e8m0fnu),)).scales == Part(0, 2)
    assert checking.compared((scales[:1],), (scales,)).wrong == "wrong: output 0 has shape (1,), wanted (2,)"
    assert checking.compared((scales.half(),), (scales,)).wrong.startswith("wrong: output 0 is torch.float16")
    assert checking.compared((codes,), (codes, scales)).wrong == "wrong: 1 outputs, wanted 2"


def test_large_outputs_are_compared_in_pieces() -> None:
    right = torch.arange(63, dtype=torch.float32).reshape(7, 9).t()
    assert checking.compared((right.contiguous(),), (right,), at_once=10).scales == Part(0, 63)
    assert checking.compared((right + (right == 62),), (right,), at_once=10).scales == Part(1, 63)


SUMS = f"{PLANTED / 'sums.py'}"


@pytest.mark.parametrize("kind", ["EXACT", "EXACT_INPUTS", "TOLERANCE", "PREPARED_EXACT"])
def test_a_contender_is_right_as_its_spec_says(kind: str) -> None:
    """FAULT 0 is right, 1 sums in another order, 2 drops a block, 3 adds to its output."""
    problem = Problem("planted-sums", NamedInts(M=7, K=173))
    reasons = {}
    for fault in (0, 1, 2, 3):
        arm = KernelContender(OURS, problem, f"{SUMS}:{kind}", 0, NamedInts(FAULT=fault, num_warps=4))
        arm.build("cpu")
        given = [each.clone() for each in kernel_contenders._inputs[arm.reference, problem]]
        reasons[fault] = arm.check().reason
        assert all(map(torch.equal, given, kernel_contenders._inputs[arm.reference, problem]))
        kernel_contenders._made.clear()
        kernel_contenders._expected.clear()
    wrong = {fault for fault, reason in reasons.items() if reason}
    assert wrong == {"EXACT": {1, 2, 3}, "EXACT_INPUTS": {2, 3}, "TOLERANCE": {2, 3}, "PREPARED_EXACT": {1, 2}}[kind]
    assert all(reasons[fault].endswith("% of elements") for fault in wrong)


def test_a_float64_reference_is_no_rival() -> None:
    problem, config = Problem("planted-sums", NamedInts(M=7, K=173)), NamedInts(FAULT=0, num_warps=4)
    arm = KernelContender(TORCH_COMPILE, problem, f"{SUMS}:TOLERANCE", 0, config)
    arm.build("cpu")
    assert cells.checked(arm).reason.endswith("is in float64: torch.compile would do other work")
