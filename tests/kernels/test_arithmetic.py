"""Scale and cast over every bfloat16 value there is."""

import math

import pytest
import torch
from cases import assert_same_bits
from slow_loop import FORMATS, cast, scale_of

from fp8tune_kernels import catalog
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, NAN_CODES, reference_cast, reference_scale
from fp8tune_kernels.spec import NamedInts

EVERY_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_reference_scale_of_every_amax(name: str, power_of_two: bool) -> None:
    amax = EVERY_BFLOAT16.abs().float().unique()
    scales = reference_scale(amax, getattr(torch, name), power_of_two)
    for value, scale in zip(amax.tolist(), scales.tolist(), strict=True):
        expected = scale_of([value], name, power_of_two)
        assert scale == expected or (math.isnan(scale) and math.isnan(expected))


@pytest.mark.parametrize("name", FORMATS)
def test_reference_cast_of_every_value(name: str) -> None:
    codes = reference_cast(EVERY_BFLOAT16, torch.tensor(3.0), getattr(torch, name)).view(torch.uint8)
    assert codes.tolist() == [cast(value, 3.0, name) for value in EVERY_BFLOAT16.tolist()]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_kernel_on_every_value_as_a_row_of_its_own(dtype: torch.dtype, power_of_two: bool, device: str) -> None:
    spec = catalog.load("rowwise-2d")
    inputs = (EVERY_BFLOAT16[:, None].to(device), dtype, power_of_two)
    outputs = spec.outputs(*inputs)
    spec.launch(NamedInts(BLOCK_SIZE=4096, BLOCK_SIZE_ITER=1, num_warps=8, num_stages=1), inputs, outputs)
    assert_same_bits(outputs, spec.reference(*inputs))


@pytest.mark.parametrize("dtype", FP8_MAX)
def test_kernel_scale_next_to_where_the_quotient_is_a_power_of_two(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.float8_e4m3fnuz and device != "cpu":
        pytest.skip("an AMD format")
    exact = FP8_MAX[dtype] * 2.0 ** torch.arange(-140, 110)
    neighbours = [exact.to(torch.float32).view(torch.int32) + step for step in range(-3, 4)]
    amax = torch.cat([bits.view(torch.float32).abs() for bits in neighbours])
    spec = catalog.load("rowwise-2d")
    inputs = (amax[:, None].to(device), dtype, True)
    outputs = spec.outputs(*inputs)
    spec.launch(NamedInts(BLOCK_SIZE=256, BLOCK_SIZE_ITER=1, num_warps=4, num_stages=1), inputs, outputs)
    assert_same_bits(outputs, spec.reference(*inputs))


def test_the_largest_values_are_those_of_the_formats() -> None:
    assert {str(dtype): largest for dtype, largest in FP8_MAX.items()} == {
        "torch.float8_e4m3fn": 448.0,
        "torch.float8_e4m3fnuz": 240.0,
        "torch.float8_e5m2": 57344.0,
    }


@pytest.mark.parametrize("dtype", FP8_MAX)
def test_the_canonical_nan_is_a_nan(dtype: torch.dtype) -> None:
    assert torch.tensor(NAN_CODES[dtype], dtype=torch.uint8).view(dtype).float().isnan()
