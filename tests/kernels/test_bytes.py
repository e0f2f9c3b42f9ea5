"""Every block size of every kernel gives the reference's bytes, over a covering array of what can go wrong."""

import functools
import itertools

import pytest
from cases import assert_same_bits, block_sizes, factors, inputs_of, leads, poisoned, problem, with_lead
from covering import covering_array

from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec, NamedInts

CHUNKS = 8
"""Tests a kernel, so that workers share them."""

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on inf * 0, in the interpreter


@functools.cache
def cases_of(kernel: str) -> list[dict]:
    return covering_array(factors(catalog.load(kernel)))


def check(spec: KernelSpec, case: dict, device: str) -> None:
    config, content = with_lead(case["config"], case["lead"]), case["content"]
    one = problem(spec, **{name: value for name, value in case.items() if name not in ("config", "lead", "content")})
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


PLAIN = {"rows": "no block divides", "in_dtype": "bfloat16", "content": "random"}
LEADS = [(kernel, lead) for kernel in catalog.KERNELS for lead in leads(catalog.load(kernel)) or (None,)]


def plain_case(spec: KernelSpec, config: NamedInts, lead: int | None, **fields: str) -> dict:
    routing = "ragged" if spec.routed else "none"
    modes = {"scale_mode": spec.scale_modes[0], "input_layout": spec.input_layouts[-1]}
    return {**PLAIN, "config": config, "lead": lead, "routing": routing, **modes, **fields}


@pytest.mark.parametrize(("kernel", "lead"), LEADS)
def test_block_sizes_below_the_grid_work_too(kernel: str, lead: int | None, device: str) -> None:
    spec = catalog.load(kernel)
    least = 32 if spec.name.startswith("mxfp8") else 16  # neither a scale's block nor a chunk is split
    smallest = {name: min(least, *values) for name, values in spec.axes.items() if "BLOCK" in name}
    config = NamedInts({**spec.default, **smallest, "num_warps": 1, "num_stages": 1})
    check(spec, plain_case(spec, config, lead, rows="blocks divide"), device)


@pytest.mark.parametrize(
    ("kernel", "lead"),
    [(kernel, lead) for kernel in catalog.KERNELS for lead in catalog.load(kernel).axes.get("LEAD", ())],
)
def test_the_grids_own_leads_give_the_reference_bytes(kernel: str, lead: int, device: str) -> None:
    spec = catalog.load(kernel)
    check(spec, plain_case(spec, spec.default, lead), device)


def test_block_sizes_hold_the_default() -> None:
    for kernel in catalog.KERNELS:
        spec = catalog.load(kernel)
        assert spec.default in block_sizes(spec)
