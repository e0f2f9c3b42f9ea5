"""The small inputs that every config is checked on beside the problem that is timed, and what is written into them.

The sizes that are timed are round: a tail that is dropped, a mask one too long, a group that is empty show only here.
A kernel with groups has the layouts of its rows among its edges, whether it declares more or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fp8tune.measure import guards
from fp8tune.records import NamedInts, Problem
from fp8tune_kernels.spec import ROUTINGS, Edge, KernelSpec

LAYOUT_CHECK_ROWS = 1021
"""M of the small problems that check the other group layouts: a prime, so that no block divides it. M is not
specialized, so the binary checked is the one that is timed."""

STEP = 61
"""Neither a dim nor a tile divides by it: every so many elements meet many slices and not all."""


def edges_of(spec: KernelSpec, problem: Problem) -> tuple[Edge, ...]:
    """What a config of ``problem`` is checked on: every group layout, then what the spec declares."""
    return tuple(dict.fromkeys([*_layouts(spec, problem), *spec.edges(problem)]))


def _layouts(spec: KernelSpec, problem: Problem) -> Iterator[Edge]:
    for routing in ROUTINGS if spec.routed else ():
        small = layout_problem(problem, routing)
        if small != problem:
            yield Edge(f"{routing} routing", small)


def layout_problem(problem: Problem, routing: str) -> Problem:
    """The same kernel, groups and row length on few rows (M, if it has one), spread as ``routing`` says."""
    rows = {"M": min(problem.shape["M"], LAYOUT_CHECK_ROWS)} if "M" in problem.shape else {}
    return replace(problem, routing=routing, shape=NamedInts({**problem.shape, **rows}))


def place(edge: Edge) -> str:
    """An edge as messages name it."""
    what = "" if edge.content == "random" else f", {edge.content}"
    where = f", {edge.offset} elements past an aligned address" if edge.offset else ""
    return f"the edge {edge.name!r} ({problem_place(edge.problem)}{what}{where})"


def problem_place(problem: Problem) -> str:
    """The problem that is timed, as messages name it."""
    return str(problem.shape) if problem.routing == "none" else f"{problem.routing} routing, {problem.shape}"


def meta_inputs(spec: KernelSpec, edge: Edge) -> tuple[Any, ...]:
    """The inputs of an edge on ``meta``: shapes, strides and whether they begin at an aligned address."""
    return tuple(_shifted(given, edge.offset) for given in spec.inputs(edge.problem, "meta"))


def _shifted(given: Any, offset: int) -> Any:
    import torch

    if not isinstance(given, torch.Tensor) or not offset:
        return given
    size = given.element_size()
    memory = torch.empty(given.untyped_storage().nbytes() // size + offset, dtype=given.dtype, device="meta")
    return memory.as_strided(given.shape, given.stride(), given.storage_offset() + offset)


def inputs(spec: KernelSpec, edge: Edge, device: str) -> tuple[Any, ...]:
    """The inputs of an edge, each tensor between guard bytes: see :func:`fill`."""
    import torch

    given = list(spec.inputs(edge.problem, device))
    for index, each in enumerate(given):
        if isinstance(each, torch.Tensor):
            if each.is_floating_point():
                fill(each, edge.content)
            given[index] = guards.guarded_copy(each, edge.offset)  # one by one: they may fill much of a GPU
    return tuple(given)


def fill(tensor: Any, content: str) -> None:
    """Write one of :data:`fp8tune_kernels.spec.CONTENTS` into a floating-point tensor of random values.

    ``tiny``: subnormals and signed zeros; ``huge``: up to the largest finite value; ``infinite`` and ``nan``: both
    signs of it in every 61st element, the others random.
    """
    import torch

    if content == "random" or not tensor.numel():
        return
    values = tensor.float() if tensor.element_size() == 1 else tensor  # float8 knows no arithmetic
    limits = torch.finfo(tensor.dtype)
    if content == "zeros":
        values.zero_()
    elif content == "tiny":
        values.mul_(limits.smallest_normal)
    elif content == "huge":
        values.clamp_(-1, 1).mul_(limits.max)
    elif content in ("infinite", "nan"):
        positions = torch.arange(values.numel(), device=values.device).view(values.shape)
        values[positions % STEP == 0] = float(content[:3])
        values[positions % (2 * STEP) == 0] *= -1
    else:
        raise ValueError(f"no content is called {content!r}: see fp8tune_kernels.spec.CONTENTS")
    if values is not tensor:
        tensor.copy_(values)
