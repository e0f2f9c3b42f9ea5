"""The torch references against loops written independently, one number at a time."""

import itertools

import pytest
import torch
from cases import CONTENTS, inputs_of
from slow_loop import FORMATS, quantize_slices

from fp8tune_kernels import catalog
from fp8tune_kernels.spec import ROUTINGS, NamedInts, Problem

MODES = list(itertools.product(FORMATS, ("power-of-two", "exact")))


def same_scales(scales: torch.Tensor, expected: list[float]) -> bool:
    wanted = torch.tensor(expected, dtype=torch.float32).reshape(scales.shape)
    return bool(((scales == wanted) | (scales.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("fp8_dtype", "scale_mode"), MODES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_colwise(routing: str, fp8_dtype: str, scale_mode: str, content: str) -> None:
    spec = catalog.load("colwise")
    one = Problem("colwise", NamedInts(M=33, K=7, G=4), routing, fp8_dtype=fp8_dtype, scale_mode=scale_mode)
    inputs = inputs_of(spec, one, content, "cpu")
    q, scales = spec.reference(*inputs)
    x, ends = inputs[0].double(), inputs[1].tolist()
    start = 0
    for group, end in enumerate(ends):
        codes, expected = quantize_slices(x[start:end].t().tolist(), fp8_dtype, scale_mode == "power-of-two")
        assert q[start:end].view(torch.uint8).t().tolist() == codes
        assert same_scales(scales[group * 7 : (group + 1) * 7], expected)
        start = end


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("fp8_dtype", "scale_mode"), MODES)
def test_rowwise_2d(fp8_dtype: str, scale_mode: str, content: str) -> None:
    spec = catalog.load("rowwise-2d")
    one = Problem("rowwise-2d", NamedInts(M=9, K=37), in_dtype="float32", fp8_dtype=fp8_dtype, scale_mode=scale_mode)
    inputs = inputs_of(spec, one, content, "cpu")
    q, scales = spec.reference(*inputs)
    codes, expected = quantize_slices(inputs[0].double().tolist(), fp8_dtype, scale_mode == "power-of-two")
    assert q.view(torch.uint8).tolist() == codes
    assert same_scales(scales, expected)
