"""Every block size of every kernel gives the reference's bytes, over a covering array of what can go wrong."""

import functools
import itertools

import pytest
from cases import assert_same_bits, block_sizes, factors, inputs_of, poisoned, problem
from covering import covering_array

from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec

CHUNKS = 8
"""Tests a kernel, so that workers share them."""

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on inf * 0, in the interpreter


@functools.cache
def cases_of(kernel: str) -> list[dict]:
    return covering_array(factors(catalog.load(kernel)))


def check(spec: KernelSpec, case: dict, device: str) -> None:
    config, content = case["config"], case["content"]
    one = problem(spec, **{name: value for name, value in case.items() if name not in ("config", "content")})
    inputs = inputs_of(spec, one, content, device)
    expected = spec.reference(*inputs)
    outputs = poisoned(spec, inputs, expected)
    spec.launch(config, inputs, outputs)
    try:
        assert_same_bits(outputs, expected)
    except AssertionError as error:
        raise AssertionError(f"{one} {config} {content}: {error}") from None


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kernel", catalog.KERNELS)
def test_every_block_size_gives_the_reference_bytes(kernel: str, chunk: int, device: str) -> None:
    for case in cases_of(kernel)[chunk::CHUNKS]:
        check(catalog.load(kernel), case, device)


@pytest.mark.parametrize("kernel", catalog.KERNELS)
def test_the_cases_cover_every_pair_of_values(kernel: str) -> None:
    varied = factors(catalog.load(kernel))
    for one, other in itertools.combinations(varied, 2):
        seen = {(case[one], case[other]) for case in cases_of(kernel)}
        assert seen == set(itertools.product(varied[one], varied[other]))


@pytest.mark.parametrize("kernel", catalog.KERNELS)
def test_block_sizes_below_the_grid_work_too(kernel: str, device: str) -> None:
    spec = catalog.load(kernel)
    least = 32 if spec.name.startswith("mxfp8") else 8  # a scale's block is not split
    smallest = {name: min(least, *values) if "BLOCK" in name else 1 for name, values in spec.axes.items()}
    case = {"rows": "blocks divide", "in_dtype": "bfloat16", "scale_mode": spec.scale_modes[0]}
    routing = "ragged" if spec.routed else "none"
    check(spec, {**case, "routing": routing, "config": type(spec.default)(smallest), "content": "random"}, device)


def test_block_sizes_hold_the_default() -> None:
    for kernel in catalog.KERNELS:
        spec = catalog.load(kernel)
        assert spec.default in block_sizes(spec)
