"""Problem sizes that differ in what a key lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.plan.variations import key_faults, variations
from fp8tune.records import NamedInts
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.catalog import KERNELS

dims = st.integers(1, 2**31 - 1)


def problems(kernel: str):
    spec = load_spec(kernel)
    rows = [row for name in ("llama4", "tiny") for row in shapes.load(name).rows]
    return spec, plan.problems(spec, rows)


def test_a_name_of_nothing_and_the_exact_m_are_faults():
    spec, (problem, *_) = problems("colwise")
    for key, named in ((("M_bucket", "K", "num_elements"), "num_elements"), (("M", "K"), "M_bucket")):
        (fault,) = key_faults(replace(spec, key=key), problem)
        assert named in fault


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_argument_is_in_the_key_or_varied(kernel):
    spec, results = problems(kernel)
    for problem in results:
        assert key_faults(spec, problem) == []
        varied = {variation.argument for variation in variations(spec, problem)}
        assert varied >= {dim for dim in problem.shape if dim not in spec.key}
        assert {*(["scale_mode"] if spec.scale_modes else []), "seed"} <= varied
        assert ("routing" in varied) == spec.routed
        assert not varied & set(spec.key)


@given(st.sampled_from(KERNELS), st.data())
def test_a_variation_differs_in_its_argument_alone_and_has_the_same_key(kernel, data):
    spec, (problem, *_) = problems(kernel)
    problem = replace(problem, shape=NamedInts({dim: data.draw(dims) for dim in problem.shape}))
    for variation in variations(spec, problem):
        second, argument = variation.problem, variation.argument
        assert spec.lookup_key(second) == spec.lookup_key(problem)
        if argument in problem.shape:
            assert second.shape[argument] >= 1
            back = replace(second, shape=NamedInts({**second.shape, argument: problem.shape[argument]}))
        else:
            back = replace(second, **{argument: getattr(problem, argument)})
        assert second != problem
        assert back == problem
