"""The small inputs that every config is checked on beside the problem that is timed, and what is written into them.

The sizes that are timed are round: a tail that is dropped, a mask one too long, a group that is empty show only here.
A kernel with groups has the layouts of its rows among its edges, whether it declares more or not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
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
        small = layout_problem(spec, problem, routing)
        if small != problem:
            yield Edge(f"{routing} routing", small)


def layout_problem(spec: KernelSpec, problem: Problem, routing: str) -> Problem:
    """The same kernel, groups and row length on few rows (M, if it has one), spread as ``routing`` says.

    Dims of the spec's ``layout_sizes`` are no larger than these.
    """
    most = {"M": LAYOUT_CHECK_ROWS, **spec.layout_sizes}
    shape = NamedInts([(dim, min(size, most.get(dim, size))) for dim, size in problem.shape.items()])
    return replace(problem, routing=routing, shape=shape)


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
    """The inputs of an edge, each tensor between guard bytes: see :func:`fill`.

    Of a kernel with ``check="exact-inputs"`` they hold integers where they would hold random values.
    """
    import torch

    given = list(spec.inputs(edge.problem, device))
    if spec.check == "exact-inputs":
        _fill_all_with_integers(given, edge)
    else:
        for each in given:
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                fill(each, edge.content)
    if spec.constrain is not None:
        spec.constrain(tuple(given))
    for index, each in enumerate(given):
        if isinstance(each, torch.Tensor):
            given[index] = guards.guarded_copy(each, edge.offset)  # one by one: they may fill much of a GPU
    return tuple(given)


def _fill_all_with_integers(given: Sequence[Any], edge: Edge) -> None:
    """Float32 beside narrower types is a scale, and so is E8M0.

    A scale stays an integer where values are zeros or tiny: a kernel may divide by it, and all would be
    NaN or infinite.
    """
    import torch

    floats = {n: each for n, each in enumerate(given) if isinstance(each, torch.Tensor) and each.is_floating_point()}
    narrowest = min((each.element_size() for each in floats.values()), default=0)
    for index, each in floats.items():
        is_scale = each.dtype == torch.float8_e8m0fnu or each.element_size() > max(2, narrowest)
        content = "integers" if is_scale and edge.content in ("zeros", "tiny") else edge.content
        fill_integers(each, edge.problem.seed + index, content, is_scale)


@contextlib.contextmanager
def exact_values(spec: KernelSpec, problem: Problem, given: Sequence[Any]) -> Iterator[None]:
    """While open, inputs whose sums are compared byte for byte hold integers: see :func:`fill_integers`."""
    import torch

    if spec.check != "exact-inputs":
        yield
        return
    random = [each.clone() if isinstance(each, torch.Tensor) else None for each in given]
    _fill_all_with_integers(given, Edge("", problem))
    if spec.constrain is not None:
        spec.constrain(tuple(given))
    try:
        yield
    finally:
        for each, before in zip(given, random, strict=True):
            if before is not None:
                _own(each).copy_(_own(before))


def fill(tensor: Any, content: str) -> None:
    """Write one of :data:`fp8tune_kernels.spec.CONTENTS` into a floating-point tensor of random values.

    ``tiny``: subnormals and signed zeros; ``huge``: up to the largest finite value; ``infinite`` and ``nan``: both
    signs of it in every 61st element, the others random; ``integers``: :func:`fill_integers`. A type that has no
    infinity gets NaN: torch would write 448 as float8_e4m3fn, beside which Hopper's tensor cores cut off integers.
    """
    import torch

    if content == "integers":
        fill_integers(tensor)
    if content in ("random", "integers") or not tensor.numel():
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
        has_it = not torch.tensor(float(content[:3])).to(tensor.dtype).float().isfinite()
        values[positions % STEP == 0] = float(content[:3] if has_it else "nan")
        values[positions % (2 * STEP) == 0] *= -1
    else:
        raise ValueError(f"no content is called {content!r}: see fp8tune_kernels.spec.CONTENTS")
    if values is not tensor:
        tensor.copy_(values)


LARGEST_EXPONENT = 26
"""2 ** 20 products of four values of up to 2 ** 26 are below 2 ** 125: float32 holds them."""

SMALLEST_EXPONENT = -30
"""A product of four values of 2 ** -31 or more is at least 2 ** -124. Float32 would round a much smaller one to a zero,
whose sign depends on whether it was added by itself or within a fused multiply-add."""


def fill_integers(tensor: Any, seed: int = 0, content: str = "integers", is_scale: bool = False) -> None:
    """Write values whose products are summed exactly in float32, in any order: -1, -1/2, 1/2 and 1; of a scale 1/2, 1.

    Float32 holds each whole number up to 2 ** 24. A value is 1 or 2 halves, and a product of two values and two scales
    is 1 to 16 sixteenths. So up to 2 ** 20 of them come to no more than 2 ** 24 sixteenths, and no partial sum is
    rounded. Bfloat16 and each float8 hold the values. None is zero, so that each term counts, and a tensor of two
    elements or more holds two values: it is not constant.

    Hopper's FP8 tensor cores keep 13 fractional bits of the largest product of a step, or of the sum so far. Products
    of values are whole quarters from 1/4 to 1. So nothing is cut off as long as the sum so far stays below 2 ** 12: of
    a sum of 2 ** 11, 13 bits reach down to quarters. Signs are even, so the sum is a random walk with a standard
    deviation of ``0.625 * sqrt(terms)``. It is 226 at 2 ** 17 terms: 2 ** 12 is 18 of them away. At 2 ** 20 terms 6.4
    are left, which is too near. If all terms had one sign, 2 ** 13 of them would be too many. ``huge`` and ``tiny``
    multiply all values by one power of two, which changes nothing here.

    ``nan``, ``infinite`` and ``zeros`` are as :func:`fill` has them, the other values integers. ``huge`` and ``tiny``:
    the integers times a power of two that float32's range allows (:data:`LARGEST_EXPONENT`, :data:`SMALLEST_EXPONENT`)
    and the type's. Half of the tiny ones are subnormal in a type whose least normal value is 2 ** -30 or more.
    """
    import torch

    tensor = _own(tensor)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    drawn = torch.randint(0, 4, (tensor.numel(),), dtype=torch.int8, device=tensor.device, generator=generator)
    drawn[:2] = torch.arange(2, dtype=torch.int8, device=tensor.device)[: len(drawn)]
    values = (1 + (drawn & 1)) * (1 if is_scale else 1 - (drawn & 2))
    scale = 0.5
    if content == "huge":
        scale *= 2.0 ** min(LARGEST_EXPONENT, math.floor(math.log2(torch.finfo(tensor.dtype).max)))
    if content == "tiny":
        scale *= 2.0 ** max(SMALLEST_EXPONENT, math.log2(torch.finfo(tensor.dtype).smallest_normal))
    tensor.copy_(values.view(tensor.shape).to(torch.bfloat16) * scale)
    if content not in ("random", "integers", "huge", "tiny"):
        fill(tensor, content)


def _own(tensor: Any) -> Any:
    """The elements that a tensor has memory for: one along a dim that is expanded."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
