"""What a sweep times of the grouped GEMMs, beside what it checks, and the codes that their operands may hold."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8tune.measure import checking
from fp8tune_kernels import catalog
from fp8tune_kernels.gemm import operands
from fp8tune_kernels.spec import NamedInts, Problem

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities, in the interpreter

GEMMS = ("grouped-rows", "grouped-contraction")
FP8 = "float8_e4m3fn"

SHAPES = {
    "grouped-rows": NamedInts(M=277, N=272, K=144, G=3),
    "grouped-contraction": NamedInts(M=277, N=272, K=272, G=3),
}
"""No block divides a dim, and each has more than one of every block."""


@pytest.mark.parametrize("in_dtype", [FP8, "bfloat16"])
@pytest.mark.parametrize("kernel", GEMMS)
def test_random_values_are_timed_with_zeros_between_groups(kernel: str, in_dtype: str, device: str) -> None:
    spec = catalog.load(kernel)
    problem = Problem(kernel, SHAPES[kernel], "empty", in_dtype=in_dtype)
    on = checking.build(spec, problem, device)
    assert on.refusal is None
    checked, timed = (
        [each.float() for each in given if isinstance(each, torch.Tensor) and each.is_floating_point()]
        for given in (on.inputs, on.timed.inputs)
    )
    between = torch.zeros(len(timed[0]), dtype=torch.bool, device=device)
    if kernel == "grouped-contraction" and in_dtype == FP8:
        between[:] = True
        _, _, offs, *_ = on.inputs
        place, start = 0, 0
        for end in offs.tolist():
            between[place : place + end - start] = False
            place += max(1, -(-(end - start) // 128)) * 128
            start = end
        assert 0 < int(between.sum()) < len(between)
    for number, (one, other) in enumerate(zip(checked[:2], timed[:2], strict=True)):
        rows = between if kernel == "grouped-contraction" else torch.zeros(len(one), dtype=torch.bool, device=device)
        assert not one[rows].any(), number
        assert not other[rows].any(), number
        assert set(one[~rows].abs().unique().tolist()) == {0.5, 1}
        assert len(other[~rows].unique()) > 100
        assert 0.5 < float((other[~rows] / other[~rows].std()).abs().mean()) < 0.9  # 0.8 of normal values
    for one, other in zip(checked[2:], timed[2:], strict=True):
        assert set(one.unique().tolist()) == {0.5, 1}
        assert set(other.unique().tolist()) == {2.0**exponent for exponent in range(-3, 4)}
    assert on.timed.check(spec.default, [0]) is None  # nothing is compared there but guard bytes and inputs


CODES = """
import torch
from fp8tune_kernels.gemm import grouped_rows

for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16):
    scales = () if dtype == torch.bfloat16 else (torch.ones(256), torch.ones(1, 16))
    a = torch.zeros(256, 16, dtype=dtype)
    if scales:
        a.view(torch.uint8)[:, 3] = torch.arange(256, dtype=torch.uint8)
    else:
        a[:, 3] = torch.arange(256) * float("inf")
    b = torch.zeros(1, 16, 16, dtype=dtype)
    b[0, 5, 3] = 1
    inputs = (a, b, torch.tensor([256], dtype=torch.int32), *(scales or (None, None)))
    for descriptors in (0, 1, 2):
        out = grouped_rows.outputs(*inputs)
        grouped_rows.launch({**grouped_rows.SPEC.default, "DESCRIPTORS": descriptors}, inputs, out)
        right = a[:, 3].float().bfloat16()
        assert torch.allclose(out[0][:, 5], right, 0, 0, equal_nan=True), (dtype, out[0][:, 5])
        assert out[0][:, 5].isnan().sum() == (2 if dtype == torch.float8_e4m3fn else 1)
"""


def test_every_code_is_multiplied_as_torch_reads_it_where_nothing_else_was_imported() -> None:
    """The interpreter takes NaN for 480 and bfloat16 for its bits unless it was repaired."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", CODES], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.filterwarnings("error")  # torch 2.13 only warns where an address of a traced tensor is read
def test_a_traced_tensor_on_a_gpu_has_no_address_to_check() -> None:
    with FakeTensorMode():
        traced = torch.empty(64, 64, device="cuda")
    operands.check_addresses(a=traced)
