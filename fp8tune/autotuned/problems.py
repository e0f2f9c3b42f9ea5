"""The launches of a recorded kernel as problems: sizes by name, and a layout that stands for all else."""

from __future__ import annotations

from collections.abc import Sequence

from fp8tune.autotuned.values import dtype_number, number
from fp8tune.recording import Kernel, Launch, Scalar, Tensor
from fp8tune.records import RECORDED, NamedInts, Problem

ODD = "odd-"
"""Begins the layout of the same launch at sizes that no block divides."""

_FLOATS = ("float", "bfloat")


def key(kernel: Kernel) -> tuple[str, ...]:
    """The names of the lookup key: those of the autotuner's key, then the dtypes in which launches differ."""
    given = [{argument.name for argument in launch.arguments} for launch in kernel.launches]
    tensors = {argument.name for launch in kernel.launches for argument in tensors_of(launch)}
    named = [name for name in kernel.key if name not in tensors and all(name in names for names in given)]
    return (*named, *(f"{name}_dtype" for name in _differing(kernel.launches)))


def problems(kernel: Kernel) -> dict[Problem, Launch]:
    """Each launch under its problem, in the order of the recording."""
    differing = _differing(kernel.launches)
    return {problem(kernel, launch, differing, RECORDED): launch for launch in kernel.launches}


def problem(kernel: Kernel, launch: Launch, differing: Sequence[str], layout: str) -> Problem:
    """The problem of one launch; ``differing``: the tensors whose dtypes are sizes."""
    dtypes = {argument.name: argument.dtype for argument in tensors_of(launch)}
    floats = [dtype for dtype in dtypes.values() if dtype.startswith(_FLOATS)]
    return Problem(
        kernel.name,
        _shape(kernel, launch, differing),
        input_layout=f"{layout}{launch.id}",
        in_dtype=next(iter([*floats, *dtypes.values()]), ""),
        fp8_dtype="",
        scale_mode="",
    )


def tensors_of(launch: Launch) -> list[Tensor]:
    """The arguments that are tensors."""
    return [argument for argument in launch.arguments if isinstance(argument, Tensor)]


def _shape(kernel: Kernel, launch: Launch, differing: Sequence[str]) -> NamedInts:
    scalars = {argument.name: argument.value for argument in launch.arguments if isinstance(argument, Scalar)}
    dtypes = {argument.name: argument.dtype for argument in tensors_of(launch)}
    sizes = {name: number(scalars[name]) for name in kernel.key if name in scalars}
    sizes |= {f"{name}_dtype": dtype_number(dtypes[name]) for name in differing if name in dtypes}
    sizes |= {name: value for name, value in scalars.items() if _is_size(name, value) and name not in sizes}
    if not sizes:  # a kernel may take its sizes from nothing but the shapes of its grid
        first = next(iter(tensors_of(launch)), None)
        sizes = {f"{first.name}_{dim}": size for dim, size in enumerate(first.shape)} if first and first.shape else {}
    return NamedInts(sizes or {"count": 1})


def _is_size(name: str, value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63 and "stride" not in name.lower()


def _differing(launches: Sequence[Launch]) -> list[str]:
    """The tensors that have not the same dtype in all launches."""
    dtypes: dict[str, set[str]] = {}
    for launch in launches:
        for argument in tensors_of(launch):
            dtypes.setdefault(argument.name, set()).add(argument.dtype)
    return [name for name, found in dtypes.items() if len(found) > 1]
