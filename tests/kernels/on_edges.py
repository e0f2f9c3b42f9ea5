"""The check that a sweep makes of a config before it times it, on a kernel's edges, at sizes for the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from fp8tune.measure import checking, edges
from fp8tune.measure.comparing import EXACT
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import Edge, KernelSpec, NamedInts, Problem

ROW = {"M": 16640, "K": 5120, "N": 8192, "E": 16}
"""A row of a shape set; each kernel scales its problem down to what the interpreter can run."""

MOST_ROWS = 20_000
"""Of an edge: a sort of more takes the interpreter seconds."""


def problem_of(spec: KernelSpec, layout: str = "", in_dtype: str = "", **fields: str) -> Problem:
    """The problem whose edges are checked: ragged groups, and the first layout, dtype and scale mode of the spec."""
    usual = {
        "routing": "ragged" if spec.routed else "none",
        "input_layout": layout or spec.input_layouts[0],
        "in_dtype": in_dtype or spec.in_dtypes[0],
        "scale_mode": (*spec.scale_modes, "")[0],
        **fields,
    }
    *_, shape = spec.problems(ROW)
    return spec.scaled_down(Problem(spec.name, shape, **usual))


@functools.lru_cache(maxsize=4)
def tensors_on_edges(problem: Problem, first: int = 0, step: int = 1) -> tuple[checking.Tensors, ...]:
    """Tensors of a problem and of its edges, the smallest first, or of every ``step``-th.

    A check leaves them unchanged: configs and faulty copies share them.
    """
    spec = catalog.load(problem.kernel)
    small = [edge for edge in edges.edges_of(spec, problem) if is_small(edge.problem)]
    builders = [
        functools.partial(checking.build, spec, Edge("", problem), "cpu"),
        *(functools.partial(checking.build, spec, edge, "cpu") for edge in small),
    ]
    tensors = [build() for build in builders[first::step]]
    return tuple(sorted(tensors, key=lambda tensor: tensor.in_a_row_bytes))


def is_small(problem: Problem) -> bool:
    return problem.shape.get("M", 0) < MOST_ROWS


def smallest(spec: KernelSpec) -> NamedInts:
    """The config with short blocks, but not of one row: an edge has several of each, and a part of one.

    ``LEAD`` is how many turns a program waits with nothing to do: one is enough where programs run in turn.
    """
    shortest = {
        name: min(size for size in values if size > 1)
        for name, values in spec.axes.items()
        if "BLOCK" in name or name == "TILE"
    }
    return with_short_lead(NamedInts({**spec.default, **shortest}))


def with_short_lead(config: NamedInts) -> NamedInts:
    return NamedInts({name: min(value, 1) if name == "LEAD" else value for name, value in config.items()})


def faults_found(spec: KernelSpec, problem: Problem, config: NamedInts, from_largest: bool = False) -> Iterator[str]:
    """Yield the faults in the outputs of a spec, or of a faulty copy, on each edge."""
    edges = [*enumerate(tensors_on_edges(problem))]
    for number, tensors in reversed(edges) if from_largest else edges:
        if wrong := replace(tensors, spec=spec).check(config, [number]):
            yield wrong


def assert_same_bits(result: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    """Equal dtype, shape, strides and bits; a NaN scale may have any payload."""
    for first, second in zip(result, right, strict=True):
        assert (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
        assert EXACT.difference(first, second) is None
