"""Launches of a recorded kernel as problems: sizes by name, and a layout that stands for all else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fp8tune.errors import UsageError
from fp8tune.records import RECORDED, NamedInts, Problem
from fp8tune.replay.configs import is_size
from fp8tune.replay.recording import Kernel, Launch
from fp8tune.replay.values import dtype_number, number, text_of

ODD = "odd-"  # begins the layout of the same launch at sizes that no block divides


class Word(int):
    """A number in a shape that stands for a text, a dtype or a float; prints as that."""

    text: str

    def __new__(cls, number: int, text: str) -> Word:
        """Return the number with its text."""
        word = super().__new__(cls, number)
        word.text = text
        return word

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return Word, (int(self), self.text)


def in_words(problem: Problem, launch: Launch) -> Problem:
    """Return an equal problem whose sizes print as the arguments of its launch do: ``MODE=silu TO=float16``."""
    words = {
        name: Word(number(value), text_of(value)) for name, value in launch.scalars.items() if type(value) is not int
    }
    words |= {f"{item.name}_dtype": Word(dtype_number(item.dtype), item.dtype) for item in launch.tensors}
    shape = [(name, words[name] if words.get(name) == size else size) for name, size in problem.shape.items()]
    return replace(problem, shape=NamedInts(shape))


def key(kernel: Kernel, shared: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the lookup key: those of the autotuner's key, then the dtypes in which launches differ.

    ``shared``: the arguments that decide alone, see :func:`problems`.
    """
    names = [name for name in kernel.key if all(name in launch.scalars for launch in kernel.launches)]
    return tuple(shared) or (*names, *(f"{name}_dtype" for name in kernel.mixed))


def problems(kernel: Kernel, shared: Sequence[str] = ()) -> dict[Problem, tuple[Launch, ...]]:
    """Return launches by problem, in the order of the recording: one each, or those with equal ``shared`` arguments.

    Such launches share a config, and are timed one after the other. Raises UsageError for a name that is no number.
    """
    for name in shared:
        if not all(type(launch.scalars.get(name)) is int for launch in kernel.launches):
            raise UsageError(f"shared={name}: not every launch of {kernel.name} has a whole number of that name")
    groups: dict[Any, list[Launch]] = {}
    for launch in kernel.launches:
        place = tuple(launch.scalars[name] for name in shared) if shared else launch.id
        groups.setdefault(place, []).append(launch)
    return {problem(kernel, launches, RECORDED, shared): tuple(launches) for launches in groups.values()}


def problem(kernel: Kernel, launches: Sequence[Launch], layout: str, shared: Sequence[str] = ()) -> Problem:
    """Return the problem of launches. Sizes in which they differ are left out."""
    every = [_sizes(kernel, launch, shared) for launch in launches]
    sizes = {name: size for name, size in every[0].items() if all(item.get(name) == size for item in every)}
    ids = [launch.id for launch in launches]
    return Problem(
        kernel.name,
        NamedInts({name.replace("[", "_").replace("]", ""): size for name, size in sizes.items()} or {"count": 1}),
        input_layout=layout + (ids[0] if len(ids) == 1 else hashlib.sha256("".join(ids).encode()).hexdigest()[:12]),
        in_dtype=next((item.dtype for item in sorted(launches[0].tensors, key=lambda item: item.is_integer)), ""),
        fp8_dtype="",
        scale_mode="",
    )


def _sizes(kernel: Kernel, launch: Launch, shared: Sequence[str]) -> dict[str, int]:
    """Return the sizes of a launch by name: those that decide first."""
    dtypes, scalars = {item.name: item.dtype for item in launch.tensors}, launch.scalars
    sizes = {name: number(scalars[name]) for name in (*shared, *kernel.key) if name in scalars}
    sizes |= {f"{name}_dtype": dtype_number(dtypes[name]) for name in kernel.mixed if name in dtypes}
    sizes |= {name: value for name, value in scalars.items() if is_size(name, value) and name not in sizes}
    if not sizes and launch.tensors:  # a kernel may take its sizes from nothing but the shapes of its grid
        first = launch.tensors[0]
        sizes = {f"{first.name}_{dim}": size for dim, size in enumerate(first.shape)}
    return sizes
