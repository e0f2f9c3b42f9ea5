"""No kernel is timed on constant input: a GPU takes less power, and so less time, where no bit changes."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp8tune.measure.checking import is_constant
from fp8tune.records import Problem
from fp8tune_kernels import catalog


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones])
def test_constant_input_is_seen_in_every_layout(fill):
    assert is_constant(fill(64, 32, dtype=torch.bfloat16))
    assert is_constant(fill(64, 32, dtype=torch.bfloat16).t())
    almost = fill(64, 32, dtype=torch.bfloat16)
    almost[63, 31] = 2.0
    assert not is_constant(almost)


def test_what_is_no_data_may_be_constant():
    assert not is_constant(torch.float8_e4m3fn)
    assert not is_constant(torch.zeros(1))
    assert not is_constant(torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("kernel", catalog.KERNELS)
def test_no_kernel_of_the_family_is_timed_on_constant_input(kernel):
    spec = catalog.load(kernel)
    shape = next(spec.problems({"M": 64, "K": 128, "N": 128, "E": 2}))
    routing = "balanced" if spec.routed else "none"
    for in_dtype, scale_mode in itertools.product(spec.in_dtypes, spec.scale_modes or ("power-of-two",)):
        given = Problem(kernel, shape, routing, in_dtype=in_dtype, scale_mode=scale_mode)
        assert not any(is_constant(each) for each in spec.inputs(given, "cpu")), (in_dtype, scale_mode)
