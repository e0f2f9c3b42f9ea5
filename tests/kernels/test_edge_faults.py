"""What round sizes, random values and aligned addresses hide, the check before the clock finds on a kernel's edges."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import leads, round_shape
from edge_mutants import FAULTS_OF_EDGES
from planting import plant_foreign, planted

from fp8tune.measure import checking, tensor_cache
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.trial import checked_block
from fp8tune.records import Outcome, Status
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import CONTENTS, Edge, KernelSpec, NamedInts, Problem

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on infinities, in the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_edges.py compiles them side by side"),
]

BLOCKS = {
    "colwise": {"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 128},
    "colwise-3d": {"BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 1024},
    "colwise-dual": {"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 128},
    "colwise-transpose-3d": {"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 64},
    "mxfp8-dim0": {"BLOCK_SIZE_M": 4, "BLOCK_SIZE_K": 128},
    "mxfp8-dim1": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64},
    "mxfp8-dim1-3d": {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64},
    "mxfp8-dim1-3d-via-2d": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64},
    "rowwise": {"BLOCK_SIZE": 16, "BLOCK_SIZE_ITER": 256},
    "rowwise-2d": {"BLOCK_SIZE": 4, "BLOCK_SIZE_ITER": 1024},
    "rowwise-colwise": {"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 64},
    "rowwise-factored": {"BLOCK_SIZE_M": 4, "TILE": 2048},
    "transpose-3d-atomic": {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64},
    "transpose-3d-reduction": {"BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32},
    "transposed-codes": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 64},
    "transposed-codes-3d": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64},
}
"""Of the one config that is checked."""


KERNELS = (*catalog.QUANTIZERS, *catalog.TRANSPOSERS)


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """A process keeps the tensors of edges for its next config; here each test has a kernel of its own."""
    yield
    tensor_cache.clear()


def config_of(spec: KernelSpec) -> NamedInts:
    return NamedInts({**spec.default, **BLOCKS[spec.name], **leads(spec)[0]})


def round_problem(spec: KernelSpec, name: str, layout: str) -> Problem:
    routing = "balanced" if spec.routed else "none"
    mode = (*spec.scale_modes, "")[0]
    shape = round_shape(spec.name, config_of(spec))
    return Problem(name, shape, routing, layout, in_dtype=spec.in_dtypes[0], scale_mode=mode)


def kernel_of(title: str) -> str:
    return title.partition(":")[0].split(", ")[0]


@functools.lru_cache(maxsize=2)
def checked_on(kernel: str, layout: str) -> tuple[checking.Tensors, tuple[tuple[Edge, checking.Tensors], ...]]:
    """The tensors of the round problem and of each declared edge: a kernel's faults share them."""
    spec = catalog.load(kernel)
    problem = round_problem(spec, kernel, layout)
    on_edges = tuple((edge, checking.build_edge(spec, edge, "cpu")) for edge in spec.edges(problem))
    return checking.build(spec, problem, "cpu"), on_edges


def promise(edge: Edge, what: str) -> int:
    """How much of a fault's title an edge has. The most is tried first, then what is small: for time alone."""
    of_groups = "group" in what and "alignment" in edge.problem.shape
    of_padding = what.startswith(("padding", "columns of no group")) and "no group" in edge.name
    of_padding |= what.endswith("padded") and "half a block" in edge.name  # on others such a kernel raises
    of_content = {"NaN": "nan", "infinity": "infinite", "zeros": "zeros"}.get(what.split()[-1]) == edge.content
    return (edge.offset > 0 and "unaligned" in what) + of_groups + of_padding + of_content


@pytest.mark.parametrize("title", sorted(FAULTS_OF_EDGES, key=lambda title: KERNELS.index(kernel_of(title))))
def test_a_fault_that_a_round_problem_hides_is_found_on_an_edge(title: str, tmp_path: Path) -> None:
    """The declared edges find it alone; a kernel with groups is checked on every group layout besides."""
    modules, _, what = title.partition(": ")
    own = catalog.load(kernel_of(title))
    on_round, on_edges = checked_on(own.name, own.input_layouts[-1 if ", panels" in modules else 0])
    spec, config = planted(title, tmp_path, *FAULTS_OF_EDGES[title]), config_of(own)
    assert replace(on_round, spec=spec).check(config, [0]) is None
    tried = sorted(enumerate(on_edges), key=lambda each: (-promise(each[1][0], what), each[1][1].in_a_row_bytes))
    assert any(replace(tensors, spec=spec).check(config, [number]) for number, (_, tensors) in tried)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_copy_without_a_fault_is_right_on_all_edges(kernel: str, tmp_path: Path, device: str) -> None:
    """As a trial checks it."""
    copy, spec = plant_foreign(kernel, ("", ""), tmp_path), catalog.load(kernel)
    for layout in spec.input_layouts:
        arm = KernelArm(copy.edges_alone, round_problem(spec, copy.name, layout), config_of(spec))
        assert checked_block(arm, device, 0, times=False) == Outcome(Status.OK)


def test_every_kernel_has_six_faults_of_edges_and_more() -> None:
    found = Counter(map(kernel_of, FAULTS_OF_EDGES))
    assert set(found) == set(KERNELS)
    assert min(count for kernel, count in found.items() if kernel in catalog.QUANTIZERS) >= 6, found
    assert min(count for kernel, count in found.items() if kernel in catalog.TRANSPOSERS) >= 3, found


@pytest.fixture(params=catalog.QUANTIZERS)
def spec(request: pytest.FixtureRequest) -> KernelSpec:
    return catalog.load(request.param)


def declared(spec: KernelSpec) -> list[Edge]:
    row = {"M": 16640, "K": 5120, "N": 8192, "E": 16}
    routing = "jagged" if spec.routed else "none"
    return [*spec.edges(Problem(spec.name, next(spec.problems(row)), routing, spec.input_layouts[-1]))]


def test_edges_have_every_content_odd_sizes_a_size_of_one_and_an_unaligned_address(spec: KernelSpec) -> None:
    edges = declared(spec)
    assert len({edge.name for edge in edges}) == len(edges)
    assert {edge.content for edge in edges} == set(CONTENTS) - {"integers"}
    assert any(edge.offset for edge in edges)
    for dim in set(next(iter(edges)).problem.shape) - {"G"}:
        sizes = [edge.problem.shape[dim] for edge in edges]
        assert 1 in sizes or (dim == "N" and "transpose-3d" in spec.name)  # which take two rows or more on a GPU
        assert any(size % 2 and size > 1 for size in sizes)
        assert any(size % 32 == 16 or (size % 2 and size > 1) for size in sizes)


def test_a_kernel_with_groups_has_edges_with_empty_groups_and_rows_of_none(spec: KernelSpec) -> None:
    routings = {edge.problem.routing for edge in declared(spec)}
    assert routings == ({"ragged", "balanced", "empty"} if spec.routed else {"none"})


def test_edges_are_small_and_take_two_binaries_or_three_beside_the_one_that_is_timed(spec: KernelSpec) -> None:
    """Triton specializes code on sizes of 1, on multiples of 16 and on addresses that are."""
    edges = declared(spec)
    for edge in edges:
        tensors = [each for each in spec.inputs(edge.problem, "meta") if hasattr(each, "numel")]
        assert sum(each.numel() for each in tensors) <= 600_000
    specialised = [dim for dim in ("N", "K") if dim in edges[0].problem.shape]
    if spec.name == "colwise-3d":
        specialised = ["K"]  # its columns are rows of rowwise-2d
    binaries = {
        (edge.offset % 8 == 0, *[(edge.problem.shape[dim] == 1, edge.problem.shape[dim] % 16) for dim in specialised])
        for edge in edges
    }
    timed = (True, *[(False, 0) for _ in specialised])
    assert timed in binaries
    assert 2 <= len(binaries - {timed}) <= 3
