"""The torch references against loops written independently, one number at a time."""

import itertools

import pytest
import torch
from cases import CONTENTS, assert_same_bits, inputs_of
from slow_loop import FORMATS, quantize_slices

from fp8tune_kernels import catalog
from fp8tune_kernels.spec import ROUTINGS, NamedInts, Problem

MODES = list(itertools.product(FORMATS, ("power-of-two", "exact")))


def same_scales(scales: torch.Tensor, expected: list[float]) -> bool:
    wanted = torch.tensor(expected, dtype=torch.float32).reshape(scales.shape)
    return bool(((scales == wanted) | (scales.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize(("fp8_dtype", "scale_mode"), MODES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_colwise(routing: str, fp8_dtype: str, scale_mode: str) -> None:
    spec = catalog.load("colwise")
    one = Problem("colwise", NamedInts(M=33, K=7, G=4), routing, fp8_dtype=fp8_dtype, scale_mode=scale_mode)
    for content in CONTENTS:
        inputs = inputs_of(spec, one, content, "cpu")
        q, scales = spec.reference(*inputs)
        x, ends = inputs[0].double(), inputs[1].tolist()
        start = 0
        for group, end in enumerate(ends):
            codes, expected = quantize_slices(x[start:end].t().tolist(), fp8_dtype, scale_mode == "power-of-two")
            assert q[start:end].view(torch.uint8).t().tolist() == codes
            assert same_scales(scales[group * 7 : (group + 1) * 7], expected)
            start = end


@pytest.mark.parametrize(("fp8_dtype", "scale_mode"), MODES)
def test_rowwise_2d(fp8_dtype: str, scale_mode: str) -> None:
    spec = catalog.load("rowwise-2d")
    one = Problem("rowwise-2d", NamedInts(M=9, K=37), in_dtype="float32", fp8_dtype=fp8_dtype, scale_mode=scale_mode)
    for content in CONTENTS:
        inputs = inputs_of(spec, one, content, "cpu")
        q, scales = spec.reference(*inputs)
        codes, expected = quantize_slices(inputs[0].double().tolist(), fp8_dtype, scale_mode == "power-of-two")
        assert q.view(torch.uint8).tolist() == codes
        assert same_scales(scales, expected)


@pytest.mark.parametrize(("fp8_dtype", "scale_mode"), MODES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_rowwise(routing: str, fp8_dtype: str, scale_mode: str) -> None:
    spec = catalog.load("rowwise")
    layout = spec.input_layouts[ROUTINGS.index(routing) % 2]
    one = Problem("rowwise", NamedInts(N=7, M=33, G=4), routing, layout, fp8_dtype=fp8_dtype, scale_mode=scale_mode)
    for content in CONTENTS:
        inputs = inputs_of(spec, one, content, "cpu")
        q, scales = spec.reference(*inputs)
        start = 0
        for group, end in enumerate(inputs[1].tolist()):
            slices = inputs[0][:, start:end].double().tolist()
            codes, expected = quantize_slices(slices, fp8_dtype, scale_mode == "power-of-two")
            assert q[:, start:end].view(torch.uint8).tolist() == codes
            assert same_scales(scales[group * 7 : (group + 1) * 7], expected)
            start = end


def test_colwise_dual_is_colwise_of_either() -> None:
    spec, single = catalog.load("colwise-dual"), catalog.load("colwise")
    inputs = spec.inputs(Problem("colwise-dual", NamedInts(M=33, N=7, K=5, G=4), "ragged"), "cpu")
    x, y, *rest = inputs
    assert not torch.equal(x[:, :5], y)
    assert_same_bits(spec.reference(*inputs), (*single.reference(x, *rest), *single.reference(y, *rest)))


@pytest.mark.parametrize(("fp8_dtype", "scale_mode"), MODES)
@pytest.mark.parametrize("kernel", ["colwise-3d", "transpose-3d-atomic", "transpose-3d-reduction"])
def test_weights(kernel: str, fp8_dtype: str, scale_mode: str) -> None:
    spec = catalog.load(kernel)
    one = Problem(kernel, NamedInts(E=2, N=13, K=11), fp8_dtype=fp8_dtype, scale_mode=scale_mode)
    for content in CONTENTS:
        inputs = inputs_of(spec, one, content, "cpu")
        q, scales = spec.reference(*inputs)
        reduced_last = (0, 2, 1) if kernel == "colwise-3d" else (0, 1, 2)  # of w, (E, K, N)
        slices = inputs[0].double().permute(reduced_last).flatten(0, 1).tolist()
        codes, expected = quantize_slices(slices, fp8_dtype, scale_mode == "power-of-two")
        assert q.view(torch.uint8).mT.flatten(0, 1).tolist() == codes  # (E, K, N) or, transposed, (E, N, K)
        assert same_scales(scales, expected)
