"""Problem sizes under one lookup key, each with another value of an argument that the key lacks.

An argument that the key does not name must not change which config wins. The FP8 dtype is not varied, because a table
has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fp8tune.records import NamedInts, Problem
from fp8tune_kernels.spec import DTYPE_FLAG, LAYOUT_FLAG, ROUTINGS, KernelSpec, bucket

STEP = 32  # varied sizes are multiples of this if they are larger: MXFP8 blocks over groups need it of M


@dataclass(frozen=True)
class Variation:
    """A problem size that differs from another in one argument."""

    argument: str  # a dim of the shape, or another field of :class:`~fp8tune_kernels.spec.Problem`
    problem: Problem


def key_faults(spec: KernelSpec, problem: Problem) -> list[str]:
    """Describe names in the key that are no size of the kernel, and the exact M."""
    sizes, shown = {LAYOUT_FLAG, DTYPE_FLAG, *problem.shape}, ", ".join(problem.shape)
    return [
        "M is in the key as it is, and changes every step: name M_bucket"
        if name == "M"
        else f"{name} is in the key, and no size of {spec.name} has that name: {shown}"
        for name in spec.key
        if name == "M" or name.removesuffix("_bucket") not in sizes
    ]


def variations(spec: KernelSpec, problem: Problem) -> list[Variation]:
    """Vary each argument that the key lacks, one at a time; all results have the same lookup key."""
    seed = Variation("seed", replace(problem, seed=problem.seed + 1))
    varied = dict.fromkeys([*(_of_launches if spec.recorded else _of_arguments)(spec, problem), seed])
    return [variation for variation in varied if variation.problem != problem]


def _of_launches(spec: KernelSpec, problem: Problem) -> Iterator[Variation]:
    """Yield recorded launches: nobody knows the arguments of such a kernel at other sizes."""
    key = spec.lookup_key(problem)
    for launch in (launch for launch in spec.recorded if spec.lookup_key(launch) == key):
        dims = [dim for dim, size in launch.shape.items() if problem.shape.get(dim) != size]
        yield Variation(next(iter(dims), "input_layout"), replace(launch, seed=problem.seed))


def _of_arguments(spec: KernelSpec, problem: Problem) -> Iterator[Variation]:
    for dim, size in problem.shape.items():
        sizes, least = [max(1, size // 2), 2 * size], bucket(size)
        if f"{dim}_bucket" in spec.key:  # both ends and the middle of the bucket
            sizes = [least, 3 * least // 2, 2 * least - STEP if least > STEP else 2 * least - 1]
        for size in [] if dim in spec.key else sizes:
            yield Variation(dim, replace(problem, shape=NamedInts({**problem.shape, dim: size})))
    fields = {
        "routing": ROUTINGS if spec.routed else (),
        "input_layout": () if LAYOUT_FLAG in spec.key else spec.input_layouts,
        "in_dtype": () if DTYPE_FLAG in spec.key else spec.in_dtypes,
        "scale_mode": spec.scale_modes,
    }
    for name, values in fields.items():
        yield from (Variation(name, replace(problem, **{name: value})) for value in values)  # type: ignore[arg-type]
