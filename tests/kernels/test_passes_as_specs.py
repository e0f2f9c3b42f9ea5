"""The passes of ``fp8_grouped_mm`` as specs: what is swept, and that every method gives the reference's bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8tune.measure import checking, edges
from fp8tune.plan import problems as plan
from fp8tune_kernels import catalog
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.gemm.grouped_mm_passes import ANY, ANY_ONCE, FP8_ONLY
from fp8tune_kernels.gemm.passes import BF16, BF16_TORCH, FP8, FP8_TORCH
from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

ROW = {"M": 109, "K": 48, "N": 80, "E": 3}
METHODS = (BF16_TORCH, BF16, FP8_TORCH, FP8)


@pytest.fixture(params=catalog.PASSES)
def spec(request: pytest.FixtureRequest) -> KernelSpec:
    return catalog.load(request.param)


def of(spec: KernelSpec) -> list[Problem]:
    return plan.problems(spec, [ROW])


def test_a_pass_is_swept_with_the_precisions_it_can_have(spec: KernelSpec) -> None:
    precisions = [problem.shape["precision"] for problem in of(spec)]
    weights = spec.name == "grouped-mm-weight-gradient"
    assert precisions == ([FP8_ONLY, ANY] if weights else [FP8_ONLY, ANY, ANY_ONCE])
    assert not list(spec.problems({**ROW, "K": 83}))  # no grouped GEMM takes it
    assert list(spec.axes["METHOD"]) == [*METHODS]
    assert len({spec.lookup_key(problem) for problem in of(spec)}) == len(precisions)


def test_precision_fp8_multiplies_in_fp8_whatever_the_arch(spec: KernelSpec) -> None:
    for limits in (None, *(arch.limits() for arch in ARCHES.values())):
        for problem in of(spec):
            kept = [c["METHOD"] for c, why in plan.configs(spec, problem, spec.axes, limits).items() if not why]
            allowed = {FP8_TORCH, FP8} if problem.shape["precision"] == FP8_ONLY else {*METHODS}
            runs = limits is None or limits.arch in ("sm_90", "sm_100", "gfx942", "gfx950")
            assert {*kept} == allowed - ({FP8_TORCH} if not runs else set())
            assert kept[0] == FP8


def test_the_bytes_are_those_of_operands_and_results(spec: KernelSpec) -> None:
    M, K, N, G = ROW.values()
    for problem in of(spec):
        weights = (1 if problem.shape["precision"] == ANY_ONCE else 2) * G * N * K
        assert spec.bytes_of(problem) == 2 * M * (N + K) + weights
        inputs = spec.inputs(problem, "meta")
        read = [each for each in inputs if isinstance(each, torch.Tensor) and each.element_size() <= 2]
        written = sum(output.nbytes for output in spec.outputs(*inputs))
        if problem.shape["precision"] != ANY_ONCE:
            assert sum(each.nbytes for each in read) + written == spec.bytes_of(problem)


@pytest.mark.parametrize("name", ["grouped-mm-forward", "grouped-mm-input-gradient"])
def test_codes_follow_the_weights(name: str, device: str, quantizers_in_plain_torch: None) -> None:
    spec = catalog.load(name)
    problem = of(spec)[ANY_ONCE]
    _, B_t, _, codes, scales, _ = random = spec.inputs(problem, device)
    before = codes.clone()
    with edges.exact_values(spec, problem, random):
        dim = 1 if name == "grouped-mm-forward" else 2
        assert torch.equal(codes.float() / scales, B_t.float() if dim == 1 else B_t.transpose(1, 2).float())
    assert torch.equal(codes.float(), before.float())


@pytest.mark.parametrize("name", ["grouped-mm-forward", "grouped-mm-input-gradient"])
def test_scales_of_long_rows_are_fit_to_be_timed(name: str, device: str, quantizers_in_plain_torch: None) -> None:
    spec = catalog.load(name)
    for sizes in ({"K": 8192, "N": 32}, {"K": 32, "N": 8192}):
        problem = plan.problems(spec, [{"M": 16, "E": 1, **sizes}])[ANY_ONCE]
        assert not any(checking.is_constant(given) for given in spec.inputs(problem, device))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_references_bytes(
    spec: KernelSpec, method: int, device: str, quantizers_in_plain_torch: None
) -> None:
    for problem in of(spec):
        tensors = checking.build(spec, problem, device)
        assert tensors.check(NamedInts(METHOD=method)) is None
    for edge in edges.edges_of(spec, problem):
        small = replace(edge, problem=replace(edge.problem, shape=NamedInts({**edge.problem.shape, "precision": ANY})))
        assert checking.build_edge(spec, small, device).check(NamedInts(METHOD=method), [0]) is None


def test_a_method_that_is_wrong_is_found(spec: KernelSpec, device: str, quantizers_in_plain_torch: None) -> None:
    """The scale of a neighbour, in what the launch returns."""

    def launch(config: NamedInts, given: tuple, out: tuple) -> tuple:
        (right,) = spec.launch(config, given, out)
        right[..., -1:] *= 2
        return (right,)

    tensors = checking.build(replace(spec, launch=launch), of(spec)[0], device)
    assert "elements differ" in (tensors.check(NamedInts(METHOD=FP8)) or "")


def test_the_kernels_of_a_method_are_compiled_ahead(compiling: dict[str, Any]) -> None:
    """In a process without Triton's interpreter: on meta tensors a pass launches what it launches on a GPU."""
    launches = compiling["launches_of_a_pass"]
    assert len(launches) == len(METHODS)
    assert all(device == "meta" for device, *_ in launches)
    for method in (BF16, FP8):
        assert launches[method][-1] == "grouped_rows_kernel"
    assert "rowwise_2d_kernel" in launches[FP8_TORCH]
