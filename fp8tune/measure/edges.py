"""The small inputs that every config is checked on beside the problem that is timed, and the values in them.

The sizes that are timed are round: a tail that is dropped, a mask one too long, an empty group show only here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fp8tune.measure import guards
from fp8tune.measure.guards import is_tensor
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.lazy import torch
from fp8tune_kernels.spec import ROUTINGS, Edge, KernelSpec

# M of the small problems that check the other group layouts: a prime, so that no block divides it. M is not
# specialized, so the binary that is checked is the one that is timed.
LAYOUT_CHECK_ROWS = 1021

STEP = 61  # every 61st element is infinite or NaN: no dim or tile divides by it, so these meet many slices and not all


def edges_of(spec: KernelSpec, problem: Problem) -> tuple[Edge, ...]:
    """Return the edge cases of a problem: every group layout on few rows, then what the spec declares."""
    most = {"M": LAYOUT_CHECK_ROWS, **spec.layout_sizes}
    shape = NamedInts([(dim, min(size, most.get(dim, size))) for dim, size in problem.shape.items()])
    small = [replace(problem, routing=routing, shape=shape) for routing in (ROUTINGS if spec.routed else ())]
    layouts = [Edge(f"{layout.routing} routing", layout) for layout in small if layout != problem]
    return tuple(dict.fromkeys([*layouts, *spec.edges(problem)]))


def place(edge: Edge) -> str:
    """Name an edge case for messages, or the problem that is timed."""
    problem, routing = edge.problem, edge.problem.routing
    size = str(problem.shape) if routing == "none" else f"{routing} routing, {problem.shape}"
    content = "" if edge.content == "random" else f", {edge.content}"
    offset = f", {edge.offset} elements past an aligned address" if edge.offset else ""
    return f"the edge {edge.name!r} ({size}{content}{offset})" if edge.name else size


def meta_inputs(spec: KernelSpec, edge: Edge) -> tuple[Any, ...]:
    """Return the inputs of an edge on ``meta``: with its shapes, strides and alignment."""
    values = spec.inputs(edge.problem, "meta")
    return tuple(guards.guarded(value, "meta", edge.offset) if is_tensor(value) else value for value in values)


def inputs(spec: KernelSpec, edge: Edge, device: str) -> tuple[Any, ...]:
    """Return the inputs of an edge, each tensor between guard bytes: see :func:`fill`.

    For a kernel with ``check="exact-inputs"`` they hold integers instead of random values.
    """
    values = list(spec.inputs(edge.problem, device))
    if spec.check == "exact-inputs":
        _fill_all_with_integers(values, edge)
    else:
        for tensor in values:
            if is_tensor(tensor) and tensor.is_floating_point():
                fill(tensor, edge.content)
    if spec.constrain is not None:
        spec.constrain(tuple(values))
    for index, tensor in enumerate(values):
        if is_tensor(tensor):
            values[index] = guards.guarded_copy(tensor, edge.offset)  # one by one: they may fill much of a GPU
    return tuple(values)


@contextlib.contextmanager
def exact_values(spec: KernelSpec, problem: Problem, values: Sequence[Any]) -> Iterator[None]:
    """Put integers into inputs whose sums are compared byte for byte, for the time of the block."""
    if spec.check != "exact-inputs":
        yield
        return
    random = [tensor.clone() if is_tensor(tensor) else None for tensor in values]
    _fill_all_with_integers(values, Edge("", problem))
    if spec.constrain is not None:
        spec.constrain(tuple(values))
    try:
        yield
    finally:
        for tensor, before in zip(values, random, strict=True):
            if before is not None:
                in_memory(tensor).copy_(in_memory(before))


def _fill_all_with_integers(values: Sequence[Any], edge: Edge) -> None:
    """Fill floating-point inputs. Float32 beside narrower types is a scale, and so is E8M0.

    A scale stays an integer where values are zeros or tiny: a kernel may divide by it, and everything would be NaN or
    infinite.
    """
    floats = {n: value for n, value in enumerate(values) if is_tensor(value) and value.is_floating_point()}
    narrowest = min((tensor.element_size() for tensor in floats.values()), default=0)
    for index, tensor in floats.items():
        is_scale = tensor.dtype == torch.float8_e8m0fnu or tensor.element_size() > max(2, narrowest)
        content = "integers" if is_scale and edge.content in ("zeros", "tiny") else edge.content
        fill_integers(tensor, edge.problem.seed + index, content, is_scale)


def fill(tensor: Any, content: str) -> None:
    """Write one of :data:`fp8tune_kernels.spec.CONTENTS` into a floating-point tensor of random values.

    ``tiny``: subnormals and signed zeros; ``huge``: up to the largest finite value; ``infinite`` and ``nan``: both
    signs of it in every 61st element, the others random; ``integers``: :func:`fill_integers`.
    """
    if content == "integers":
        fill_integers(tensor)
    if content in ("random", "integers") or not tensor.numel():
        return
    values = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no arithmetic
    limits = torch.finfo(tensor.dtype)
    if content == "zeros":
        values.zero_()
    elif content == "tiny":
        values.mul_(limits.smallest_normal)
    elif content == "huge":
        values.clamp_(-1, 1).mul_(limits.max)
    elif content in ("infinite", "nan"):
        positions = torch.arange(values.numel(), device=values.device).view(values.shape)
        # A type without infinity gets NaN. Torch would write 448 as float8_e4m3fn, beside which Hopper's tensor cores
        # cut off integers.
        has_value = not torch.tensor(float(content[:3])).to(tensor.dtype).float().isfinite()
        values[positions % STEP == 0] = float(content[:3] if has_value else "nan")
        values[positions % (2 * STEP) == 0] *= -1
    else:
        raise ValueError(f"no content is called {content!r}: see fp8tune_kernels.spec.CONTENTS")
    if values is not tensor:
        tensor.copy_(values)


LARGEST_EXPONENT = 26  # 2 ** 20 products of four values of up to 2 ** 26 are below 2 ** 125: float32 holds them
# A product of four values of 2 ** -31 or more is at least 2 ** -124. Float32 would round a much smaller one to a zero,
# whose sign depends on whether it was added by itself or within a fused multiply-add.
SMALLEST_EXPONENT = -30


def fill_integers(tensor: Any, seed: int = 0, content: str = "integers", is_scale: bool = False) -> None:
    """Write values whose products are summed exactly in float32, in any order: -1, -1/2, 1/2 and 1; of a scale 1/2, 1.

    A product of two values and two scales is 1 to 16 sixteenths, so up to 2 ** 20 of them come to at most 2 ** 24
    sixteenths, which float32 holds. None is zero, so that each term counts, and two elements or more are not constant.
    Hopper's FP8 tensor cores keep 13 fractional bits of the sum so far, and products of values are whole quarters: they
    are exact below 2 ** 12. Signs are even: a sum of 2 ** 17 terms is a random walk, 18 standard deviations below that.

    ``nan``, ``infinite`` and ``zeros`` are as in :func:`fill`, between integers. ``huge`` and ``tiny`` multiply the
    integers by one power of two that the ranges of float32 and of the type allow.
    """
    tensor = in_memory(tensor)
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


def in_memory(tensor: Any) -> Any:
    """Return the elements that have memory of their own: one along a dim that is expanded."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
