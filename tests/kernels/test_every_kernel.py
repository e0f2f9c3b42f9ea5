"""Every kernel of the catalog equals its reference on all of its edges, and the check that says so finds faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_faults import FAULTS, FAULTS_ON_HOPPER, LARGE, SETTINGS
from on_edges import (
    faults_found,
    is_small,
    problem_of,
    smallest,
    tensors_on_edges,
    with_short_lead,
)
from planting import plant_foreign, planted

from fp8tune.measure.checking import build
from fp8tune.measure.edges import edges_of
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import CONTENTS, Edge, KernelSpec, NamedInts, Problem

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on infinities, in the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_kernels_on_gpu.py compiles them side by side"),
]

each_kernel = pytest.mark.parametrize("kernel", catalog.KERNELS)


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """A worker process runs other tests afterwards."""
    yield
    tensors_on_edges.cache_clear()


def configs_in_turn(spec: KernelSpec, count: int) -> Iterator[NamedInts]:
    """Yield ``count`` configs, in which each value of each axis occurs beside many of the others."""
    for number in range(count):
        values = {
            name: values[(number + number // len(values) * place) % len(values)]
            for place, (name, values) in enumerate(spec.axes.items())
        }
        yield with_short_lead(NamedInts(values))


@each_kernel
def test_edges_are_right_in_different_configs(kernel: str) -> None:
    """Check every second edge here, and the rest in other dtypes: edges vary sizes, groups, contents and addresses.
    Of each further layout every fourth: most of its code is the first's."""
    spec = catalog.load(kernel)
    for place, layout in enumerate(spec.input_layouts):
        on_edges = tensors_on_edges(problem_of(spec, layout), step=4 if place else 2)
        for number, (tensors, config) in enumerate(zip(on_edges, configs_in_turn(spec, len(on_edges)), strict=True)):
            assert tensors.check(config, [number]) is None, config


def other_problems(spec: KernelSpec) -> Iterator[Problem]:
    """Each dtype of the inputs, each FP8 format and each scale mode beside the usual ones."""
    dtypes = ("float32", "float16") if spec.name in catalog.QUANTIZERS else spec.in_dtypes[1:]
    for number, in_dtype in enumerate(dtypes):
        fields = {"scale_mode": spec.scale_modes[-1 - number]} if spec.scale_modes else {}
        if spec.name in catalog.QUANTIZERS:
            fields["fp8_dtype"] = ("float8_e5m2", "float8_e4m3fnuz")[number]
        yield problem_of(spec, spec.input_layouts[-1], in_dtype, **fields)


CLAMP_NAN = {("transposed-codes", "float8_e4m3fnuz"), ("gathered-transpose", "float8_e4m3fnuz")}
"""Their references make 240 of the format's one NaN beside infinite shifts, where the kernels give NaN."""


@each_kernel
def test_other_dtypes_are_right_on_the_other_edges(kernel: str) -> None:
    spec = catalog.load(kernel)
    problems = [*other_problems(spec)]
    for place, problem in enumerate(problems):
        for number, tensors in enumerate(tensors_on_edges(problem, 1 + 2 * place, 2 * len(problems))):
            if (kernel, problem.in_dtype) in CLAMP_NAN and ", infinite" in tensors.place:
                continue
            config = smallest(spec) if number % 2 else [*configs_in_turn(spec, number + 1)][-1]
            assert tensors.check(config, [number]) is None, (problem, config)


@each_kernel
def test_nothing_is_launched_without_rows(kernel: str) -> None:
    spec = catalog.load(kernel)
    problem = problem_of(spec)
    dim = "M" if "M" in problem.shape else "E"
    empty = replace(problem, shape=NamedInts({**problem.shape, dim: 0}), routing="balanced" if spec.routed else "none")
    assert build(spec, Edge("", empty), "cpu").check(with_short_lead(spec.default)) is None


@pytest.mark.parametrize("kernel", [kernel for kernel in catalog.KERNELS if "LEAD" in catalog.load(kernel).axes])
def test_the_grids_longest_lead_is_right(kernel: str) -> None:
    """Elsewhere programs wait for one turn: hundreds, of which the interpreter needs none, take it seconds."""
    spec = catalog.load(kernel)
    tensors = build(spec, Edge("", problem_of(spec)), "cpu")
    assert tensors.check(NamedInts({**spec.default, "LEAD": max(spec.axes["LEAD"])}), [0]) is None


@pytest.mark.parametrize("title", FAULTS)
def test_a_planted_fault_is_found(title: str, tmp_path: Path) -> None:
    modules = title.partition(":")[0].split(", ")
    own = catalog.load(modules[0])
    problem = problem_of(own, own.input_layouts[-1 if "panels" in modules else 0])
    spec = planted(title, tmp_path, *FAULTS[title])
    configs = [smallest(own), with_short_lead(own.default)]
    configs += [NamedInts({**config, "LEAD": 0}) for config in configs if 0 in own.axes.get("LEAD", ())]
    configs = [NamedInts({**config, **SETTINGS.get(title, {})}) for config in configs]
    faults = (fault for config in configs for fault in faults_found(spec, problem, config, title in LARGE))
    fault = next(faults, "")
    assert "elements differ, first at" in fault or "bytes written" in fault


@pytest.mark.parametrize("title", FAULTS_ON_HOPPER)
def test_faults_of_code_for_hopper_can_be_planted(title: str, tmp_path: Path) -> None:
    fault = FAULTS_ON_HOPPER[title]
    _, reference = plant_foreign(title, fault, tmp_path)
    compile(Path(reference.rpartition(":")[0]).read_text(), title, "exec")
    texts = [file.read_text() for file in tmp_path.iterdir()]
    assert all(any(wrong in text for text in texts) for wrong in fault[1::2])


def test_every_kernel_has_faults_and_a_copy_without_one_is_right(tmp_path: Path) -> None:
    assert {title.partition(":")[0].split(", ")[0] for title in FAULTS} == {*catalog.KERNELS} - {*catalog.ON_HOPPER}
    for kernel in ("rowwise-2d", "mxfp8-dim1", "gather-sum"):
        (folder := tmp_path / kernel).mkdir()
        spec = catalog.load(kernel)
        assert [*faults_found(planted(kernel, folder), problem_of(spec), smallest(spec))] == []


# The edges that kernels declare


@each_kernel
def test_edges_have_odd_sizes_groups_without_rows_and_an_unaligned_address_and_are_small(kernel: str) -> None:
    spec = catalog.load(kernel)
    edges = [*spec.edges(problem_of(spec))]
    for edge in filter(lambda edge: is_small(edge.problem), edges):
        inputs = spec.inputs(edge.problem, "meta")
        assert sum(value.numel() for value in inputs if isinstance(value, torch.Tensor)) <= 1_000_000
    assert len({edge.name for edge in edges}) == len(edges) >= 6
    if spec.routed:
        assert {edge.problem.routing for edge in edges} >= {"ragged", "balanced", "empty"}
        assert len(edges_of(spec, problem_of(spec))) > len(edges)  # with every group layout
    if kernel not in catalog.QUANTIZERS:
        return
    assert {edge.content for edge in edges} == set(CONTENTS) - {"integers"}
    assert any(edge.offset for edge in edges)
    for dim in set(edges[0].problem.shape) - {"G"}:
        assert any(edge.problem.shape[dim] % 2 for edge in edges)


@pytest.mark.parametrize("kernel", catalog.GEMMS)
def test_contents_leave_elements_that_are_neither_nan_nor_zero(kernel: str) -> None:
    """An edge on which all outputs are NaN finds no other fault."""
    for tensors in tensors_on_edges(problem_of(catalog.load(kernel))):
        expected = tensors.expected[0].float()
        assert expected.isnan().float().mean() < 0.8, tensors.place
        assert bool((expected != 0).any()) or "zeros" in tensors.place


def test_a_sort_of_more_blocks_than_are_added_up_at_a_time() -> None:
    """With blocks of 16 pairs, 1,025 of them."""
    ids = torch.randint(0, 2, (16 * 1024 + 1, 1), generator=torch.Generator().manual_seed(0))
    spec = catalog.load("expert-sort")
    inputs = ids, torch.rand(ids.shape), 2
    outputs = spec.outputs(*inputs)
    spec.launch({**spec.default, "BLOCK_SIZE": 16}, inputs, outputs)
    for output, right in zip(outputs, spec.reference(*inputs), strict=True):
        assert torch.equal(output, right)


@pytest.mark.parametrize(
    ("kernel", "shape"), [("colwise", {"M": 300, "K": 5}), ("transposed-codes", {"M": 300, "K": 16})]
)
def test_more_groups_than_are_counted_at_once(kernel: str, shape: dict[str, int]) -> None:
    spec = catalog.load(kernel)
    problem = Problem(kernel, NamedInts({**shape, "G": 131}), "ragged", in_dtype=spec.in_dtypes[0])
    on = tensors_on_edges.__wrapped__(problem)[-1]
    assert on.check(with_short_lead(spec.default), [0]) is None
