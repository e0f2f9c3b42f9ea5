"""Every block size of every kernel gives the reference's bytes, over a covering array of what can go wrong."""

import functools
import itertools

import pytest
from cases import PROBLEM, assert_same_bits, config_of, factors, inputs_of, leads, poisoned, problem
from covering import covering_array

from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec

CHUNKS = 4
"""Tests a kernel, so that workers share them."""

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on inf * 0, in the interpreter


@functools.cache
def cases_of(kernel: str) -> list[dict]:
    return covering_array(factors(catalog.load(kernel)))


def check(spec: KernelSpec, case: dict, device: str) -> None:
    config, content = config_of(spec, case), case["content"]
    one = problem(spec, config=config, **{name: case[name] for name in PROBLEM})
    inputs = inputs_of(spec, one, content, device)
    expected = spec.reference(*inputs)
    outputs = poisoned(spec, inputs, expected)
    spec.launch(config, inputs, outputs)
    try:
        assert_same_bits(outputs, expected)
    except AssertionError as error:
        raise AssertionError(f"{one} {config} {content}: {error}") from None


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kernel", catalog.QUANTIZERS)
def test_every_block_size_gives_the_reference_bytes(kernel: str, chunk: int, device: str) -> None:
    for case in cases_of(kernel)[chunk::CHUNKS]:
        check(catalog.load(kernel), case, device)


@pytest.mark.parametrize("kernel", catalog.QUANTIZERS)
def test_the_cases_cover_every_pair_of_values(kernel: str) -> None:
    varied = factors(catalog.load(kernel))
    for one, other in itertools.combinations(varied, 2):
        seen = {(case[one], case[other]) for case in cases_of(kernel)}
        assert seen == set(itertools.product(varied[one], varied[other]))


def check_plain(kernel: str, rows: str, config: dict[str, int], device: str) -> None:
    spec = catalog.load(kernel)
    routing = "ragged" if spec.routed else "none"
    modes = {"scale_mode": spec.scale_modes[0], "input_layout": spec.input_layouts[-1]}
    plain = {"rows": rows, "in_dtype": "bfloat16", "fp8_dtype": "float8_e4m3fn", "content": "random"}
    check(spec, {**plain, **modes, "routing": routing, "config": {**spec.default, **config}}, device)


@pytest.mark.parametrize("kernel", catalog.QUANTIZERS)
def test_block_sizes_below_the_grid_work_too(kernel: str, device: str) -> None:
    least = 32 if kernel.startswith("mxfp8") else 16  # neither a scale's block nor a chunk is split
    axes = catalog.load(kernel).axes
    smallest = {name: min(least, *values) for name, values in axes.items() if "BLOCK" in name}
    for lead in leads(catalog.load(kernel)):
        check_plain(kernel, "blocks divide", {**smallest, **lead, "num_warps": 1, "num_stages": 1}, device)


@pytest.mark.parametrize("kernel", [kernel for kernel in catalog.QUANTIZERS if "LEAD" in catalog.load(kernel).axes])
def test_the_grids_own_leads_give_the_reference_bytes(kernel: str, device: str) -> None:
    for lead in catalog.load(kernel).axes["LEAD"]:
        check_plain(kernel, "no block divides", {"LEAD": lead}, device)
