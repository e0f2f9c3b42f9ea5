"""Problems under one lookup key: each with another value of one argument that the key lacks.

What a kernel's key does not name must not change which config wins. The FP8 dtype is left alone: a table is made for
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fp8tune.records import NamedInts, Problem
from fp8tune_kernels.spec import DTYPE_FLAG, LAYOUT_FLAG, ROUTINGS, KernelSpec, bucket

STEP = 32
"""Varied sizes are multiples of this, where they are larger: what MXFP8 blocks over groups ask of M."""


@dataclass(frozen=True)
class Variation:
    """A problem that differs from another in one argument."""

    argument: str
    """A dim of the shape, or another field of :class:`~fp8tune_kernels.spec.Problem`."""
    problem: Problem


def key_faults(spec: KernelSpec, problem: Problem) -> list[str]:
    """What is wrong with the key as it is declared, one line each: names of nothing, and the exact M."""
    faults = []
    for name in spec.key:
        if name == "M":
            faults.append("M is in the key as it is, and changes every step: name M_bucket")
        elif name not in (LAYOUT_FLAG, DTYPE_FLAG) and name.removesuffix("_bucket") not in problem.shape:
            faults.append(f"{name} is in the key, and no size of {spec.name} has that name: {', '.join(problem.shape)}")
    return faults


def variations(spec: KernelSpec, problem: Problem) -> list[Variation]:
    """The problem with every argument that the key lacks varied, one at a time; every one has the same lookup key."""
    return [variation for variation in dict.fromkeys(_variations(spec, problem)) if variation.problem != problem]


def _variations(spec: KernelSpec, problem: Problem) -> Iterator[Variation]:
    """Of sizes both ends and the middle of a bucket; half and double of a dim that the key does not know at all.

    Of a recorded kernel other values and the other launches under the key: nobody knows its arguments at other sizes.
    """
    if spec.recorded:
        key = spec.lookup_key(problem)
        for launch in (launch for launch in spec.recorded if spec.lookup_key(launch) == key):
            names = [dim for dim, size in launch.shape.items() if problem.shape.get(dim) != size]
            yield Variation(next(iter(names), "input_layout"), replace(launch, seed=problem.seed))
        yield Variation("seed", replace(problem, seed=problem.seed + 1))
        return
    for dim, size in problem.shape.items():
        if dim in spec.key:
            continue
        least = bucket(size)
        within = (least, 3 * least // 2, 2 * least - STEP if least > STEP else 2 * least - 1)
        for other in within if f"{dim}_bucket" in spec.key else (max(1, size // 2), 2 * size):
            yield Variation(dim, replace(problem, shape=NamedInts({**problem.shape, dim: other})))
    if spec.routed:
        yield from (Variation("routing", replace(problem, routing=routing)) for routing in ROUTINGS)
    if LAYOUT_FLAG not in spec.key:
        yield from (Variation("input_layout", replace(problem, input_layout=name)) for name in spec.input_layouts)
    if DTYPE_FLAG not in spec.key:
        yield from (Variation("in_dtype", replace(problem, in_dtype=name)) for name in spec.in_dtypes)
    yield from (Variation("scale_mode", replace(problem, scale_mode=mode)) for mode in spec.scale_modes)
    yield Variation("seed", replace(problem, seed=problem.seed + 1))
